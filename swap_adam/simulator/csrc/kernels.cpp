// The operations that are not a CPU kernel: memory, views, copies, item().
#include <ATen/EmptyTensor.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_ops.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <torch/csrc/api/include/torch/version.h>
#include <torch/library.h>

#include "lowering.h"
#include "tensors.h"

namespace swap_adam {

namespace {

constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);
constexpr const char* kCopy = "aten::copy_";

Machine& machine() { return Machine::get(); }

// --- memory and views

c10::Device device_or_current(std::optional<c10::Device> device) {
  if (device && device->has_index()) return *device;
  return {c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(current_device())};
}

// As every device does: uninitialised memory is filled, by a kernel, in torch's deterministic mode.
at::Tensor filled_if_deterministic(at::Tensor tensor) {
  auto& context = at::globalContext();
  if (context.deterministicAlgorithms() && context.deterministicFillUninitializedMemory())
    at::native::fill_empty_deterministic_(tensor);
  return tensor;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only host tensors can be pinned");
  const c10::DeviceGuard guard(device_or_current(device));
  return filled_if_deterministic(at::detail::empty_generic(
      size, device_allocator(), kDevice, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout>, std::optional<c10::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only host tensors can be pinned");
  const c10::DeviceGuard guard(device_or_current(device));
  return filled_if_deterministic(at::detail::empty_strided_generic(
      size, stride, device_allocator(), kDevice, c10::dtype_or_default(dtype)));
}

// Makes the storage large enough for what the tensor's geometry has become.
void grow_for(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return;
  const auto needed = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), tensor.itemsize(),
      static_cast<size_t>(tensor.storage_offset()));
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  if (needed <= storage.nbytes()) return;
  const c10::DeviceGuard guard(tensor.device());
  resize_storage(storage, needed);
}

const at::Tensor& resize_(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* const impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  grow_for(self);
  return self;
}

at::Tensor& set_storage_(
    at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size,
    at::IntArrayRef stride) {
  TORCH_CHECK(
      source.device() == self.device(), "set_: the storage is on ", source.device(),
      ", the tensor on ", self.device());
  auto* const impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data() == nullptr && !size.empty()) {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride, offset);
  }
  grow_for(self);
  return self;
}

at::Tensor& set_whole_storage_(at::Tensor& self, at::Storage source) {
  const auto numel = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_(self, std::move(source), 0, {numel}, {});
}

at::Tensor& set_nothing_(at::Tensor& self) {
  return set_storage_(
      self,
      c10::Storage(
          c10::Storage::use_byte_size_t(), 0, c10::DataPtr(nullptr, self.device()),
          device_allocator(), true),
      0, {0}, {});
}

at::Tensor& set_tensor_(at::Tensor& self, const at::Tensor& source) {
  if (self.is_same(source)) return self;
  return set_storage_(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

bool is_set_to(const at::Tensor& self, const at::Tensor& other) {
  return self.storage().unsafeGetStorageImpl() == other.storage().unsafeGetStorageImpl() &&
      self.storage_offset() == other.storage_offset() && self.sizes() == other.sizes() &&
      self.strides() == other.strides();
}

bool compatible_for_shallow_copy(const at::Tensor& self, const at::Tensor& from) {
  // Module.to() keeps its Parameter objects only if `p.data = moved` may change the device.
  const auto plain = [](const at::Tensor& tensor) {
    return tensor.layout() == c10::kStrided &&
        (on_device(tensor) || tensor.device().is_cpu()) && tensor.unsafeGetTensorImpl()->has_storage();
  };
  return plain(self) && plain(from);
}

void record_stream(at::Tensor& self, at::Stream stream) {
  if (auto* const block = block_of(self))
    machine().record_stream(block, machine().timeline(stream));
}

// --- copies

// Whether the bytes of one are the bytes of the other, in one run.
bool same_bytes(const at::Tensor& a, const at::Tensor& b) {
  if (a.scalar_type() != b.scalar_type() || a.sizes() != b.sizes() || a.is_conj() != b.is_conj() ||
      a.is_neg() != b.is_neg())
    return false;
  if (a.is_contiguous() && b.is_contiguous()) return true;
  return a.strides() == b.strides() && a.is_non_overlapping_and_dense();
}

char* bytes_of(const at::Tensor& tensor) {
  return static_cast<char*>(tensor.storage().mutable_data()) +
      tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
}

// The pinned block that a host tensor lies in, with the distance of its storage from the start.
Block* pinned_of(const at::Tensor& tensor, size_t& offset) {
  const auto* const data = static_cast<const char*>(tensor.storage().data());
  auto* const block = machine().pinned_block(data);
  if (block) offset = static_cast<size_t>(data - static_cast<const char*>(block->data));
  return block;
}

// As CUDA's copy does: the allocator learns of the use when it knows the storage or its address.
void protect(Block* block, const at::Tensor& host, uint32_t timeline) {
  const auto& pointer = host.storage().data_ptr();
  if (pointer.get_context() == block || host.data_ptr() == block->data)
    machine().record_stream(block, timeline);
}

// Between the host and a device, same_bytes.
void transfer(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool in = on_device(target);
  const auto& device = in ? target : source;
  const auto& host = in ? source : target;
  const auto nbytes = static_cast<size_t>(source.nbytes());
  Operation operation(device.device().index(), kCopy);
  operation.use(device, in);
  size_t offset = 0;
  auto* const pinned = pinned_of(host, offset);
  if (pinned) operation.use(pinned, host, offset, !in);
  const auto kind = in ? Kind::copy_in : Kind::copy_out;
  machine().raise_found();
  if (non_blocking && pinned) {
    auto* const block = block_of(device);
    protect(pinned, host, operation.as_use().timeline);
    machine().add_copy(
        {in ? pinned : block, in ? block : pinned, bytes_of(source), bytes_of(target), nbytes,
         operation.as_use()});
    operation.run();
    operation.issue(kind, nbytes);
    return;
  }
  std::memcpy(bytes_of(target), bytes_of(source), nbytes);
  operation.run();
  operation.issue(kind, nbytes);
  operation.host_waits(!non_blocking);
}

void between_devices(const at::Tensor& source, const at::Tensor& target) {
  // As CUDA's: issued on the source's stream, after what the target's stream has done so far, and
  // the target's stream goes on after it.
  const auto from = machine().current(source.device().index());
  const auto to = machine().current(target.device().index());
  Event event;
  machine().record(event, to);
  machine().stream_wait(from, event);
  Operation operation(from, kCopy);
  operation.use(source, false);
  operation.use(target, true);
  operation.run();
  std::memcpy(bytes_of(target), bytes_of(source), source.nbytes());
  operation.issue(Kind::copy_peer, source.nbytes());
  machine().record(event, from);
  machine().stream_wait(to, event);
}

void within_device(const at::Tensor& source, const at::Tensor& target) {
  Operation operation(target.device().index(), kCopy);
  operation.use(source, false);
  operation.use(target, true);
  operation.run();
  {
    at::AutoDispatchBelowADInplaceOrView below;
    at::DisableRecordFunctionGuard unobserved;
    cpu_alias(target).copy_(cpu_alias(source));
  }
  operation.issue(Kind::kernel, traffic(source) + traffic(target));
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& target, bool non_blocking) {
  if (target.numel() == 0) return target;
  check_alive(self, kCopy);
  check_alive(target, kCopy);
  const auto source = self.sizes() == target.sizes() ? self : self.expand(target.sizes());
  if (on_device(source) && on_device(target) && source.device() == target.device()) {
    if (is_set_to(source, target) && source.scalar_type() == target.scalar_type() &&
        source.is_conj() == target.is_conj() && source.is_neg() == target.is_neg())
      return target;
    within_device(source, target);
    return target;
  }
  const bool host_involved = !on_device(source) || !on_device(target);
  if (same_bytes(source, target)) {
    if (host_involved)
      transfer(source, target, non_blocking);
    else
      between_devices(source, target);
    return target;
  }
  // Through temporaries in the target's layout. A host source changes its dtype on the host, except
  // without blocking, where the device does it, as on CUDA.
  if (!on_device(source) && non_blocking && source.scalar_type() != target.scalar_type()) {
    const auto plain = source.contiguous();
    auto staged = at::empty(plain.sizes(), plain.options().device(target.device()));
    transfer(plain, staged, true);
    within_device(staged, target);
    return target;
  }
  const auto plain = source.to(target.scalar_type()).contiguous().resolve_conj().resolve_neg();
  if (target.is_contiguous() && !target.is_conj() && !target.is_neg()) {
    if (host_involved)
      transfer(plain, target, non_blocking);
    else
      between_devices(plain, target);
    return target;
  }
  auto staged = at::empty(plain.sizes(), target.options().pinned_memory(false));
  if (host_involved)
    transfer(plain, staged, non_blocking && on_device(target));
  else
    between_devices(plain, staged);
  if (on_device(target))
    within_device(staged, target);
  else
    const_cast<at::Tensor&>(target).copy_(staged);
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& target) {
  target.resize_(self.sizes());
  return copy_from(self, target, false);
}

at::Scalar item(const at::Tensor& self) {
  Operation operation(self.device().index(), "aten::_local_scalar_dense");
  operation.use(self, false);
  operation.run();
  operation.issue(Kind::copy_out, self.itemsize());
  operation.host_waits();
  at::AutoDispatchBelowADInplaceOrView below;
  return at::_local_scalar_dense(cpu_alias(self));
}

void foreach_copy_(
    const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto non_blocking = stack->back().toBool();
  const auto targets = (*stack)[stack->size() - 3].toTensorVector();
  const auto sources = (*stack)[stack->size() - 2].toTensorVector();
  TORCH_CHECK(
      targets.size() == sources.size(), "_foreach_copy_: ", targets.size(), " targets, ",
      sources.size(), " sources");
  bool one_kernel = true;
  for (size_t at = 0; at < targets.size(); ++at)
    one_kernel = one_kernel && sources[at].device() == targets[at].device() &&
        sources[at].device() == targets[0].device() && sources[at].sizes() == targets[at].sizes();
  if (one_kernel && !targets.empty()) {
    lower(op, *stack);
    return;
  }
  for (size_t at = 0; at < targets.size(); ++at)
    const_cast<at::Tensor&>(targets[at]).copy_(sources[at], non_blocking);
  torch::jit::drop(*stack, 3);
}

}  // namespace

void resize_storage(c10::StorageImpl& storage, size_t nbytes) {
  auto device = storage.device();
  if (nbytes == storage.nbytes()) return;
  if (Machine::get().is_strict(kResizeOnCurrentDevice))  // as torch_npu's, whatever device it was
    device.set_index(static_cast<c10::DeviceIndex>(current_device()));
  if (nbytes == 0) {
    storage.set_data_ptr_noswap(c10::DataPtr(nullptr, device));
    storage.set_nbytes(0);
    return;
  }
  const c10::DeviceGuard guard(device);
  auto pointer = device_allocator()->allocate(nbytes);
  const auto kept = std::min(nbytes, storage.nbytes());
  if (kept > 0 && storage.data_ptr().get_deleter() == &delete_block) {
    auto* const from = static_cast<Block*>(storage.data_ptr().get_context());
    auto* const to = static_cast<Block*>(pointer.get_context());
    Operation operation(device.index(), "resize_");
    operation.use(from, 0, kept, false);
    operation.use(to, 0, kept, true);
    operation.run();
    std::memcpy(to->data, from->data, kept);
    operation.issue(Kind::kernel, 2 * kept);
  }
  storage.set_data_ptr_noswap(std::move(pointer));
  storage.set_nbytes(nbytes);
}

// torch's own error for a view of a released storage tells sizes only.
at::Tensor as_strided(
    const at::Tensor& self, at::IntArrayRef sizes, at::IntArrayRef strides,
    std::optional<int64_t> offset) {
  if (c10::multiply_integers(sizes) != 0) check_alive(self, "aten::as_strided");
  return at::native::as_strided_tensorimpl(self, sizes, strides, offset);
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("set_", &set_nothing_);
  m.impl("set_.source_Storage", &set_whole_storage_);
  m.impl("set_.source_Storage_storage_offset", &set_storage_);
  m.impl("set_.source_Tensor", &set_tensor_);
  m.impl("is_set_to", &is_set_to);
  m.impl("_has_compatible_shallow_copy_type", &compatible_for_shallow_copy);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("_foreach_copy_", torch::CppFunction::makeFromBoxedFunction<&foreach_copy_>());
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, m) {
  m.impl("_has_compatible_shallow_copy_type", &compatible_for_shallow_copy);
}

// A copy sees to these bits itself; resolving them first would be another copy, without end.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR <= 7
TORCH_LIBRARY_IMPL(_, AutogradPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
#endif

}  // namespace swap_adam
