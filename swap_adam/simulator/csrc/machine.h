// The state of the simulated machine: devices, streams, allocations, copies in flight, findings.
//
// Operations compute at once, on host memory; what is simulated is when they would have run. One
// lock guards all of this. It is recursive because freeing a tensor comes back in here, and it is
// never held while a kernel runs.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "clock.h"
#include "races.h"

namespace swap_adam {

constexpr int kPinned = -1;  // the "device" of pinned host memory
constexpr size_t kDeviceRounding = 512;
constexpr size_t kSmallPool = size_t{1} << 20;  // requests up to here come from the small pool
constexpr size_t kStreamPool = 32;

// What real devices do where this one would be kinder; see docs/simulator.md. In the order of
// control.py's names.
enum Strict : uint32_t {
  kHostCache = 1,
  kResizeOnCurrentDevice = 2,
  kLazyStatistics = 4,
  kLateFreeEvents = 8,
  kMemoryPools = 16,
  kNoElapsedTime = 32,
  kStreamPoolOf32 = 64,
};

struct Copy;

struct Block {
  uint64_t number = 0;
  int device = kPinned;
  void* data = nullptr;
  size_t nbytes = 0;   // as asked for
  size_t charged = 0;  // as accounted: rounded up
  uint32_t stream = kHost;  // the stream it was allocated on
  c10::SmallVector<uint32_t, 2> recorded;  // record_stream
  History history;
  c10::SmallVector<Copy*, 1> copies;  // in flight, from or to it, in the order of issue
  // What owns the bytes: memory of our own, or the allocation of a CPU kernel's output.
  std::unique_ptr<void, c10::DeleterFnPtr> memory{nullptr, c10::detail::deleteNothing};
  c10::Storage alias;  // the same bytes as CPU memory, for the kernels; device blocks only
  int owners = 1;      // its DataPtr and the copies in flight
};

// A copy that was issued but whose bytes have not moved yet.
struct Copy {
  Block* source_block;
  Block* target_block;
  const char* source;
  char* target;
  size_t nbytes;
  Use use;
};

struct Event {
  MarkPtr mark;
  Known known;
};

enum class Races : int { off = 0, collect = 1, raise = 2 };
enum class Kind : int { kernel = 0, copy_in = 1, copy_out = 2, copy_peer = 3 };

struct Counters {
  int64_t copies_in = 0, bytes_in = 0, copies_out = 0, bytes_out = 0, copies_peer = 0,
          bytes_peer = 0, kernels = 0, host_waits = 0, device_synchronizations = 0,
          allocations = 0, frees = 0, out_of_memory = 0, timing_events = 0;
};

struct Issued {
  const char* name;
  Kind kind;
  int device;
  int64_t stream;
  uint64_t sequence;
  size_t nbytes;
  Seconds time;
};

struct DeviceMemory {
  size_t allocated = 0, allocated_peak = 0, held = 0, held_peak = 0, reserved = 0,
         reserved_peak = 0;
  size_t capacity = 0;  // 0: no limit
  // What no allocation has found to be free yet, which statistics go on counting.
  size_t uncollected = 0, active_peak = 0;
  struct Pool {
    size_t held = 0, reserved = 0;  // reserved: the most that was held since the cache was empty
  };
  std::array<Pool, 2> pools;  // small, large
  size_t active() const { return held + uncollected; }
  Pool& pool(size_t charged) { return pools[charged > kSmallPool]; }
  void empty_cache() {
    reserved = held;
    uncollected = 0;
    for (auto& pool : pools) pool.reserved = pool.held;
  }
  std::deque<std::pair<Seconds, size_t>> timeline;
};

class Machine {
 public:
  static Machine& get();
  std::unique_lock<std::recursive_mutex> lock() {
    return std::unique_lock<std::recursive_mutex>(mutex_);
  }

  void start(int device_count);  // once
  int device_count() const { return device_count_; }

  // Streams. A stream id is the index of its timeline, 0 for a device's default stream.
  uint32_t timeline(const c10::Stream& stream) const {
    return stream.id() == 0 ? static_cast<uint32_t>(stream.device_index()) + 1
                            : static_cast<uint32_t>(stream.id());
  }
  c10::Stream stream(uint32_t timeline) const;
  c10::Stream new_stream(int device);
  uint32_t current(int device);  // timeline of the calling thread's current stream
  std::string describe(uint32_t timeline) const;

  // Events and waits.
  void record(Event& event, uint32_t timeline, bool timing = false);
  void stream_wait(uint32_t timeline, const Event& event);
  void host_wait(const Event& event);
  void host_wait_stream(uint32_t timeline);
  void host_wait_device(int device);
  bool query(const Event& event);
  bool query_stream(uint32_t timeline);

  // Memory. `memory` owns the bytes when they are there already.
  Block* allocate(
      int device, size_t nbytes,
      std::unique_ptr<void, c10::DeleterFnPtr> memory = {nullptr, c10::detail::deleteNothing});
  Block* allocate_pinned(size_t nbytes);
  void free(Block* block) noexcept;
  void empty_host_cache();
  void record_stream(Block* block, uint32_t timeline);
  Block* pinned_block(const void* pointer);
  bool maybe_pinned(const void* pointer) const {
    return pointer >= pinned_low.load(std::memory_order_relaxed) &&
        pointer < pinned_high.load(std::memory_order_relaxed);
  }
  void collect();  // gives back what recorded streams have passed by now
  bool is_strict(Strict about) const { return (strict & about) != 0; }
  void set_strict(uint32_t bits);
  // A synchronisation that torch's sync debug mode sees: raises where that is an error.
  void synchronizes(const char* name);
  DeviceMemory& memory(int device) { return memory_[static_cast<size_t>(device)]; }

  // Operations.
  void use(
      Block* block, size_t begin, size_t end, bool write, const Use& use,
      std::vector<Conflict>& conflicts);
  void launch(
      uint32_t timeline, Kind kind, const char* name, uint64_t sequence, size_t nbytes,
      int peer = -1);
  void add_copy(Copy copy);
  void found(std::string text);  // a violation; raised by the next raise_found()
  void raise_found();
  std::vector<std::string> not_raised() const {
    return {violations.begin() + static_cast<std::ptrdiff_t>(raised_), violations.end()};
  }
  void forget_found() {
    violations.clear();
    raised_ = 0;
  }
  std::string conflict(
      const Conflict& conflict, const Block& block, const Use& use, bool write, size_t begin,
      size_t end, const std::string& tensor) const;

  void reset();

  Clock clock;
  Timelines timelines;
  Counters counters;
  Races races = Races::raise;
  uint32_t strict = 0;
  int sync_debug = 0;      // 0: nothing, 1: warn, 2: error
  bool capturing = false;  // a graph: nothing may be asked or waited for
  std::vector<std::string> violations;
  bool issue_log = false;
  std::deque<Issued> issued;
  size_t pinned = 0, pinned_peak = 0, pinned_capacity = 0;
  std::atomic<const void*> pinned_low{reinterpret_cast<const void*>(UINTPTR_MAX)};
  std::atomic<const void*> pinned_high{nullptr};

 private:
  struct Leaving {  // freed, but a recorded stream has not passed yet
    int device;
    size_t charged;
    std::vector<MarkPtr> marks;
  };

  void land(Copy* copy);
  void land_passed();
  void drop(Block* block);
  void held_changed(int device, Seconds time);
  void joined_host();
  void collect_pinned();
  bool is_room(const DeviceMemory& memory, size_t charged);
  Seconds free_delay() const;
  void refuse_while_capturing(const char* what) const;
  void check_free(Block* block);

  std::recursive_mutex mutex_;
  int device_count_ = 0;
  std::vector<int> devices_;  // of each timeline
  std::vector<DeviceMemory> memory_;
  std::vector<Leaving> leaving_;
  struct LeavingPinned {  // freed, with the events that its streams have still to pass
    Block* block;
    std::vector<Event> events;
  };
  std::vector<LeavingPinned> leaving_pinned_;
  std::map<size_t, std::vector<Block*>> pinned_cache_;  // free, by accounted size
  std::vector<std::pair<std::vector<uint32_t>, size_t>> stream_pools_;  // of each device; next
  std::vector<std::unique_ptr<Copy>> copies_;  // in flight, in the order of issue
  std::map<const char*, Block*> pinned_blocks_;
  size_t raised_ = 0;  // violations that have been raised already
  uint64_t blocks_ = 0;
};

// The calling thread's current device and streams.
int current_device();
void set_current_device(int device);
uint32_t exchange_current(int device, uint32_t timeline);

}  // namespace swap_adam
