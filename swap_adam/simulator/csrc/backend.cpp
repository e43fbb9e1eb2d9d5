// What torch asks of a device: allocators, the guard (streams and events), the hooks.
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/api/include/torch/version.h>

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 8
#include <ATen/core/CachingHostAllocator.h>
#define SWAP_ADAM_HOST_ALLOCATOR
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
#include <c10/core/CachingDeviceAllocator.h>
#define SWAP_ADAM_DEVICE_ALLOCATOR
#endif

#include "generator.h"
#include "tensors.h"

namespace swap_adam {

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

Machine& machine() { return Machine::get(); }

int index_of(c10::Device device) {
  return device.has_index() ? device.index() : current_device();
}

#ifdef SWAP_ADAM_DEVICE_ALLOCATOR
using DeviceAllocatorBase = c10::DeviceAllocator;
#else
using DeviceAllocatorBase = c10::Allocator;
#endif

class DeviceAllocator final : public DeviceAllocatorBase {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const auto device = current_device();
    const c10::Device where(kType, static_cast<c10::DeviceIndex>(device));
    if (nbytes == 0) return c10::DataPtr(nullptr, where);
    auto* const block = machine().allocate(device, nbytes);
    return c10::DataPtr(block->data, block, &delete_block, where);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
#ifdef SWAP_ADAM_DEVICE_ALLOCATOR
  bool initialized() override { return machine().device_count() > 0; }
  void emptyCache(c10::MempoolId_t) override {
    auto guard = machine().lock();
    machine().collect();
    for (int device = 0; device < machine().device_count(); ++device)
      machine().memory(device).empty_cache();
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get_deleter() == &delete_block)
      machine().record_stream(
          static_cast<Block*>(pointer.get_context()), machine().timeline(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    auto guard = machine().lock();
    machine().collect();
    const auto& memory = machine().memory(device);
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto set = [](c10::CachingAllocator::StatArray& stat, size_t current, size_t peak) {
      stat[0].current = static_cast<int64_t>(current);
      stat[0].peak = static_cast<int64_t>(peak);
    };
    set(stats.allocated_bytes, memory.allocated, memory.allocated_peak);
    set(stats.requested_bytes, memory.allocated, memory.allocated_peak);
    set(stats.active_bytes, memory.active(), memory.active_peak);
    set(stats.reserved_bytes, memory.reserved, memory.reserved_peak);
    stats.num_ooms = machine().counters.out_of_memory;
    stats.num_device_alloc = machine().counters.allocations;
    stats.num_device_free = machine().counters.frees;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override {
    auto guard = machine().lock();
    machine().collect();
    auto& memory = machine().memory(device);
    memory.allocated_peak = memory.allocated;
    memory.held_peak = memory.held;
    memory.active_peak = memory.active();
    memory.reserved_peak = memory.reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device)
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 10
      override
#endif
  {
    auto guard = machine().lock();
    machine().collect();
    const auto& memory = machine().memory(device);
    const auto total = memory.capacity != 0 ? memory.capacity : size_t{1} << 40;
    return {total - std::min(total, memory.held), total};
  }
#endif
};

#ifdef SWAP_ADAM_HOST_ALLOCATOR
using PinnedAllocatorBase = at::HostAllocator;
#else
using PinnedAllocatorBase = c10::Allocator;
#endif

class PinnedAllocator final : public PinnedAllocatorBase {
 public:
  c10::DataPtr allocate(size_t nbytes) override {
    const c10::Device where(c10::DeviceType::CPU);
    if (nbytes == 0) return c10::DataPtr(nullptr, where);
    auto* const block = machine().allocate_pinned(nbytes);
    return c10::DataPtr(block->data, block, &delete_block, where);
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* target, const void* source, std::size_t count) const override {
    default_copy_data(target, source, count);
  }
#ifdef SWAP_ADAM_HOST_ALLOCATOR
  bool record_event(void* pointer, void* context, c10::Stream stream) override {
    auto guard = machine().lock();
    auto* block = machine().pinned_block(pointer);
    if (block && block != context && block->data != pointer) block = nullptr;
    if (block) machine().record_stream(block, machine().timeline(stream));
    return block != nullptr;
  }
  void empty_cache() override { machine().empty_host_cache(); }
  at::HostStats get_stats() override {
    at::HostStats stats;
    stats.allocated_bytes.current = static_cast<int64_t>(machine().pinned);
    stats.allocated_bytes.peak = static_cast<int64_t>(machine().pinned_peak);
    return stats;
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override { machine().pinned_peak = machine().pinned; }
#endif
};

DeviceAllocator g_device_allocator;
PinnedAllocator g_pinned_allocator;
REGISTER_ALLOCATOR(kType, &g_device_allocator)

}  // namespace

double elapsed_ms(const Event& first, const Event& second) {
  auto guard = machine().lock();
  const auto& clock = machine().clock;
  return 1e3 * (clock.time(second.mark) - clock.time(first.mark));
}

namespace {

struct Guard final : public c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    set_current_device(device.index());
    return before;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < machine().device_count())
      set_current_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(machine().device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return machine().stream(machine().current(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return machine().stream(static_cast<uint32_t>(index_of(device)) + 1);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return machine().new_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return machine().new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return machine().stream(
        exchange_current(stream.device_index(), machine().timeline(stream)));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return machine().query_stream(machine().timeline(stream));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    machine().host_wait_stream(machine().timeline(stream));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    machine().host_wait_device(device >= 0 ? device : current_device());
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream)
      const override {
    if (pointer.get_deleter() == &delete_block)
      machine().record_stream(
          static_cast<Block*>(pointer.get_context()), machine().timeline(stream));
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = new Event;
    machine().record(
        *static_cast<Event*>(*event), machine().timeline(stream),
        flag == c10::EventFlag::BACKEND_DEFAULT);
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) machine().stream_wait(machine().timeline(stream), *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || machine().query(*static_cast<Event*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event) machine().host_wait(*static_cast<Event*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(!machine().is_strict(kNoElapsedTime), "Backend doesn't support elapsedTime.");
    return elapsed_ms(*static_cast<Event*>(first), *static_cast<Event*>(second));
  }
  // Virtual in torch's newer versions only.
  bool isStreamCapturing(const c10::Stream&) const { return machine().capturing; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : public at::PrivateUse1HooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return machine().device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override {
    return static_cast<c10::DeviceIndex>(machine().device_count());
  }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override {
    auto guard = machine().lock();
    return machine().pinned_block(pointer) != nullptr;
  }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &g_pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override {
    return c10::Device(kType, static_cast<c10::DeviceIndex>(current_device()));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    resize_storage(*storage.unsafeGetStorageImpl(), nbytes);
  }
};

[[maybe_unused]] const bool g_hooks = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
#ifdef SWAP_ADAM_HOST_ALLOCATOR
  at::setHostAllocator(kType, &g_pinned_allocator);
#endif
  return true;
}();

}  // namespace

c10::Allocator* device_allocator() { return &g_device_allocator; }
c10::Allocator* pinned_allocator() { return &g_pinned_allocator; }
void delete_block(void* block) { Machine::get().free(static_cast<Block*>(block)); }

}  // namespace swap_adam
