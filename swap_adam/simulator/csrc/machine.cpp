#include "machine.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <sstream>

namespace swap_adam {

namespace {
constexpr size_t kTimelineCapacity = 100000, kIssuedCapacity = 1000000, kViolations = 1000;

thread_local int t_device = 0;
thread_local std::vector<uint32_t> t_streams;  // per device; 0: the default stream

void free_memory(void* pointer) { std::free(pointer); }

std::unique_ptr<void, c10::DeleterFnPtr> new_memory(size_t nbytes) {
  void* pointer = nullptr;
  TORCH_CHECK_WITH(
      OutOfMemoryError, posix_memalign(&pointer, 64, nbytes) == 0,
      "simulated accelerator: this machine has no ", nbytes, " bytes of memory left");
  return {pointer, free_memory};
}
}  // namespace

int current_device() { return t_device; }
void set_current_device(int device) {
  TORCH_CHECK(
      device >= 0 && device < Machine::get().device_count(), "there is no device simulated:",
      device, ", only ", Machine::get().device_count(), " devices");
  t_device = device;
}

uint32_t Machine::current(int device) {
  const auto index = static_cast<size_t>(device);
  if (index < t_streams.size() && t_streams[index] != 0) return t_streams[index];
  return static_cast<uint32_t>(device) + 1;
}

uint32_t exchange_current(int device, uint32_t timeline) {
  const auto before = Machine::get().current(device);
  if (t_streams.size() <= static_cast<size_t>(device)) t_streams.resize(device + 1, 0);
  t_streams[static_cast<size_t>(device)] = timeline;
  return before;
}

Machine& Machine::get() {
  static auto* machine = new Machine;  // leaked: tensors may outlive every static
  return *machine;
}

void Machine::start(int device_count) {
  if (device_count_ > 0) {
    TORCH_CHECK(
        device_count == device_count_, "the simulator was enabled with ", device_count_,
        " devices before, it cannot be enabled with ", device_count, " now");
    return;
  }
  TORCH_CHECK(
      device_count >= 1 && device_count <= 64, "device_count is ", device_count,
      ", it must be 1 to 64");
  device_count_ = device_count;
  devices_.push_back(kPinned);
  memory_.resize(static_cast<size_t>(device_count));
  stream_pools_.resize(static_cast<size_t>(device_count));
  for (int device = 0; device < device_count; ++device) {
    timelines.add();
    clock.add_stream(device);
    devices_.push_back(device);
  }
}

c10::Stream Machine::stream(uint32_t timeline) const {
  const auto device = static_cast<c10::DeviceIndex>(devices_[timeline]);
  const auto id = timeline <= static_cast<uint32_t>(device_count_) ? 0 : timeline;
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, device),
      static_cast<c10::StreamId>(id));
}

c10::Stream Machine::new_stream(int device) {
  auto guard = lock();
  auto& [pool, next] = stream_pools_[static_cast<size_t>(device)];
  if (is_strict(kStreamPoolOf32) && pool.size() == kStreamPool)
    return stream(pool[next++ % kStreamPool]);
  timelines.add();
  clock.add_stream(device);
  devices_.push_back(device);
  const auto timeline = static_cast<uint32_t>(devices_.size() - 1);
  if (is_strict(kStreamPoolOf32)) pool.push_back(timeline);
  return stream(timeline);
}

std::string Machine::describe(uint32_t timeline) const {
  if (timeline == kHost) return "the host";
  std::ostringstream text;
  if (timeline <= static_cast<uint32_t>(device_count_))
    text << "the default stream";
  else
    text << "stream " << timeline;
  text << " of simulated:" << devices_[timeline];
  return text.str();
}

// --- events and waits

void Machine::record(Event& event, uint32_t timeline, bool timing) {
  auto guard = lock();
  counters.timing_events += timing;
  clock.spend(clock.costs.event, "event record");
  event.mark = clock.mark(timeline);
  event.known = timelines.snapshot(timeline);
}

void Machine::stream_wait(uint32_t timeline, const Event& event) {
  auto guard = lock();
  clock.spend(clock.costs.event, "stream wait");
  clock.wait(timeline, event.mark);
  timelines.join(timeline, event.known);
}

void Machine::refuse_while_capturing(const char* what) const {
  TORCH_CHECK(
      !capturing, "simulated accelerator: operation not permitted when stream is capturing: ",
      what);
}

void Machine::synchronizes(const char* name) {
  TORCH_CHECK(sync_debug != 2, "called a synchronizing simulated operation: ", name);
  if (sync_debug == 1) TORCH_WARN("called a synchronizing simulated operation: ", name);
}

void Machine::set_strict(uint32_t bits) {
  auto guard = lock();
  strict = bits;
  if (!is_strict(kHostCache)) empty_host_cache();
}

void Machine::joined_host() {
  collect();
  if (!copies_.empty()) land_passed();
}

void Machine::host_wait(const Event& event) {
  auto guard = lock();
  refuse_while_capturing("waiting for an event");
  clock.block(event.mark);
  clock.spend(clock.costs.wait, "host wait");
  ++counters.host_waits;
  timelines.join(kHost, event.known);
  joined_host();
  raise_found();
}

void Machine::host_wait_stream(uint32_t timeline) {
  auto guard = lock();
  Event event{clock.mark(timeline), timelines.snapshot(timeline)};
  host_wait(event);
}

void Machine::host_wait_device(int device) {
  auto guard = lock();
  refuse_while_capturing("waiting for the device");
  std::vector<Event> events;
  clock.advance();
  for (uint32_t timeline = 1; timeline < devices_.size(); ++timeline)
    if (devices_[timeline] == device && !(clock.idle(timeline) && timelines.host_knows(timeline)))
      events.push_back({clock.mark(timeline), timelines.snapshot(timeline)});
  for (const auto& event : events) {
    clock.block(event.mark);
    timelines.join(kHost, event.known);
  }
  clock.spend(clock.costs.wait, "device synchronize");
  ++counters.device_synchronizations;
  joined_host();
  raise_found();
}

bool Machine::query(const Event& event) {
  auto guard = lock();
  refuse_while_capturing("asking for an event");
  clock.spend(clock.costs.event, "event query");  // or a loop that polls would never end
  if (!clock.passed(event.mark)) return false;
  timelines.join(kHost, event.known);
  joined_host();
  raise_found();
  return true;
}

bool Machine::query_stream(uint32_t timeline) {
  auto guard = lock();
  const Event event{clock.mark(timeline), timelines.snapshot(timeline)};
  return query(event);
}

// --- memory

void Machine::held_changed(int device, Seconds time) {
  auto& memory = memory_[static_cast<size_t>(device)];
  memory.held_peak = std::max(memory.held_peak, memory.held);
  memory.active_peak = std::max(memory.active_peak, memory.active());
  memory.reserved = std::max(memory.reserved, memory.held);
  memory.reserved_peak = std::max(memory.reserved_peak, memory.reserved);
  memory.timeline.emplace_back(time, memory.held);
  if (memory.timeline.size() > kTimelineCapacity) memory.timeline.pop_front();
}

void Machine::collect() {
  if (leaving_.empty()) return;
  clock.advance();
  std::vector<std::pair<Seconds, Leaving>> left;
  size_t kept = 0;
  for (auto& leaving : leaving_) {
    Seconds time = 0;
    bool passed = true;
    for (const auto& mark : leaving.marks) {
      passed = passed && mark->settled && clock.time(mark) <= clock.now();
      time = std::max(time, mark->time);
    }
    if (passed)
      left.emplace_back(time, std::move(leaving));
    else if (&leaving_[kept] != &leaving)
      leaving_[kept++] = std::move(leaving);
    else
      ++kept;
  }
  leaving_.resize(kept);
  std::stable_sort(left.begin(), left.end(), [](const auto& a, const auto& b) {
    return a.first < b.first;
  });
  for (const auto& [time, leaving] : left) {
    auto& memory = memory_[static_cast<size_t>(leaving.device)];
    memory.held -= leaving.charged;
    memory.pool(leaving.charged).held -= leaving.charged;
    if (is_strict(kLazyStatistics)) memory.uncollected += leaving.charged;
    held_changed(leaving.device, time);
  }
}

Seconds Machine::free_delay() const {
  // Longer than the host takes to come back from a wait for what was recorded before.
  return is_strict(kLateFreeEvents) ? clock.costs.wait + clock.costs.launch : 0;
}

bool Machine::is_room(const DeviceMemory& memory, size_t charged) {
  if (memory.capacity == 0) return true;
  if (!is_strict(kMemoryPools)) return memory.held + charged <= memory.capacity;
  // What a pool has had is lost to the other one.
  size_t reserved = 0;
  for (size_t index = 0; index < memory.pools.size(); ++index) {
    const auto& pool = memory.pools[index];
    const bool mine = index == (charged > kSmallPool);
    reserved += std::max(pool.reserved, pool.held + (mine ? charged : 0));
  }
  return reserved <= memory.capacity;
}

Block* Machine::allocate(
    int device, size_t nbytes, std::unique_ptr<void, c10::DeleterFnPtr> bytes) {
  auto guard = lock();
  const auto charged = (nbytes + kDeviceRounding - 1) / kDeviceRounding * kDeviceRounding;
  auto& memory = this->memory(device);
  collect();
  memory.uncollected = 0;
  if (!is_room(memory, charged)) {
    // As a caching allocator does before it gives up: wait for what record_stream still holds.
    std::vector<MarkPtr> marks;
    for (const auto& leaving : leaving_)
      if (leaving.device == device)
        marks.insert(marks.end(), leaving.marks.begin(), leaving.marks.end());
    if (!marks.empty()) {
      for (const auto& mark : marks) clock.block(mark);
      clock.spend(clock.costs.wait, "wait for memory");
      ++counters.host_waits;
      collect();
      memory.uncollected = 0;
    }
    if (!is_room(memory, charged)) {
      ++counters.out_of_memory;
      TORCH_CHECK_WITH(
          OutOfMemoryError, false, "simulated:", device, " is out of memory: asked for ", nbytes,
          " bytes (", charged, " as accounted), ", memory.held, " bytes are held (", memory.allocated,
          " of them allocated) of a capacity of ", memory.capacity, " bytes");
    }
  }
  auto block = std::make_unique<Block>();
  block->memory = bytes ? std::move(bytes) : new_memory(nbytes);
  block->number = ++blocks_;
  block->device = device;
  block->data = block->memory.get();
  block->nbytes = nbytes;
  block->charged = charged;
  block->stream = current(device);
  block->alias = c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes,
      c10::DataPtr(block->data, c10::Device(c10::DeviceType::CPU)), nullptr, false);
  // The memory may have been somebody else's on the same stream: who writes into it from another
  // stream must come after what this stream had issued by now.
  if (races != Races::off) {
    const Use use{block->stream, timelines.latest(block->stream), "the allocation"};
    if (!timelines.host_passed(use))
      block->history.use(0, nbytes, true, use, timelines, [](const Conflict&) {});
    if (block->stream < freed_.size()) {
      auto& freed = freed_[block->stream];
      freed.erase(
          std::remove_if(
              freed.begin(), freed.end(),
              [&](const Freed& one) { return timelines.ordered(one.use, block->stream); }),
          freed.end());
      block->inherited = freed;
    }
  }
  memory.allocated += charged;
  memory.allocated_peak = std::max(memory.allocated_peak, memory.allocated);
  memory.held += charged;
  auto& pool = memory.pool(charged);
  pool.held += charged;
  pool.reserved = std::max(pool.reserved, pool.held);
  held_changed(device, clock.now());
  ++counters.allocations;
  return block.release();
}

Block* Machine::allocate_pinned(size_t nbytes) {
  auto guard = lock();
  size_t charged = 1;
  while (charged < nbytes) charged *= 2;
  collect_pinned();
  const auto cached = pinned_cache_.find(charged);
  if (cached != pinned_cache_.end() && !cached->second.empty()) {  // its bytes as they were
    auto* const block = cached->second.back();
    cached->second.pop_back();
    block->number = ++blocks_;
    block->nbytes = nbytes;
    block->recorded.clear();
    pinned_blocks_[static_cast<const char*>(block->data)] = block;
    return block;
  }
  TORCH_CHECK(
      pinned_capacity == 0 || pinned + charged <= pinned_capacity,
      "simulated accelerator: out of pinned host memory: asked for ", nbytes, " bytes (", charged,
      " as accounted, the next power of two), ", pinned, " bytes are in use of ", pinned_capacity);
  auto block = std::make_unique<Block>();
  block->memory = new_memory(is_strict(kHostCache) ? charged : nbytes);
  block->number = ++blocks_;
  block->data = block->memory.get();
  block->nbytes = nbytes;
  block->charged = charged;
  auto* const first = static_cast<const char*>(block->data);
  if (first < pinned_low.load()) pinned_low = first;
  if (first + charged > pinned_high.load()) pinned_high = first + charged;
  pinned += charged;
  pinned_peak = std::max(pinned_peak, pinned);
  pinned_blocks_[first] = block.get();
  return block.release();
}

void Machine::collect_pinned() {
  size_t kept = 0;
  for (auto& leaving : leaving_pinned_) {
    bool passed = true;
    for (const auto& event : leaving.events) passed = passed && clock.passed(event.mark);
    if (!passed) {
      if (&leaving_pinned_[kept] != &leaving) leaving_pinned_[kept] = std::move(leaving);
      ++kept;
      continue;
    }
    for (const auto& event : leaving.events) timelines.join(kHost, event.known);
    pinned_cache_[leaving.block->charged].push_back(leaving.block);
  }
  leaving_pinned_.resize(kept);
}

void Machine::empty_host_cache() {
  auto guard = lock();
  collect_pinned();
  for (auto& [charged, blocks] : pinned_cache_)
    for (auto* const block : blocks) {
      pinned -= charged;
      drop(block);
    }
  pinned_cache_.clear();
}

Block* Machine::pinned_block(const void* pointer) {
  if (!maybe_pinned(pointer)) return nullptr;
  const auto* const address = static_cast<const char*>(pointer);
  auto found = pinned_blocks_.upper_bound(address);
  if (found == pinned_blocks_.begin()) return nullptr;
  --found;
  return address < found->first + found->second->nbytes ? found->second : nullptr;
}

void Machine::record_stream(Block* block, uint32_t timeline) {
  if (timeline == block->stream) return;
  auto guard = lock();
  if (std::find(block->recorded.begin(), block->recorded.end(), timeline) == block->recorded.end())
    block->recorded.push_back(timeline);
}

// As a caching allocator's: the stream that a block was allocated on may be given its memory again
// at once. Another stream that still uses it is no fault yet; it is one when the new owner writes
// there and nothing orders the two. Which allocation gets the memory is luck, so all of them do.
// Pinned memory goes back to the host, which waits for nothing.
void Machine::check_free(Block* block) {
  block->history.each([&](const Use& use, bool wrote, size_t begin, size_t end) {
    if (timelines.ordered(use, block->stream)) return;
    // A recorded stream stands for what it has waited for, too.
    if (std::any_of(block->recorded.begin(), block->recorded.end(),
                    [&](uint32_t stream) { return timelines.ordered(use, stream); }))
      return;
    if (block->device == kPinned) {
      std::ostringstream text;
      text << "freed in flight: allocation " << block->number << " (" << block->nbytes
           << " bytes, pinned host memory) is freed while " << use.name << " #" << use.sequence
           << " on " << describe(use.timeline) << " may still " << (wrote ? "write" : "read")
           << " bytes [" << begin << ", " << end
           << ") of it; wait for that stream on the host first";
      found(text.str());
      return;
    }
    if (freed_.size() <= block->stream) freed_.resize(block->stream + 1);
    auto& freed = freed_[block->stream];
    const Freed last{use, wrote, begin, end, block->number, block->nbytes};
    // What comes after the latest operation of a stream comes after all of its.
    const auto same = std::find_if(freed.begin(), freed.end(), [&](const Freed& other) {
      return other.use.timeline == use.timeline;
    });
    if (same == freed.end())
      freed.push_back(last);
    else if (same->use.sequence < use.sequence)
      *same = last;
  });
}

void Machine::check_reuse(Block* block, const Use& use) {
  for (const auto& freed : block->inherited) {
    if (timelines.ordered(freed.use, use.timeline)) continue;
    std::ostringstream text;
    text << "freed in flight: allocation " << freed.number << " (" << freed.nbytes
         << " bytes, simulated:" << block->device << ", allocated on " << describe(block->stream)
         << ") was freed while " << freed.use.name << " #" << freed.use.sequence << " on "
         << describe(freed.use.timeline) << " might still " << (freed.wrote ? "write" : "read")
         << " bytes [" << freed.begin << ", " << freed.end << ") of it, and nothing orders "
         << use.name << " #" << use.sequence << " on " << describe(use.timeline)
         << " after that, which writes to allocation " << block->number
         << ", perhaps the same memory; make " << describe(block->stream)
         << " wait for that operation first, or call record_stream";
    found(text.str());
    block->inherited.clear();
    return;
  }
}

void Machine::free(Block* block) noexcept {
  auto guard = lock();
  try {
    if (races != Races::off) check_free(block);
    if (block->device == kPinned) {
      pinned_blocks_.erase(static_cast<const char*>(block->data));
      if (is_strict(kHostCache)) {
        LeavingPinned leaving{block, {}};
        for (const auto timeline : block->recorded)
          leaving.events.push_back(
              {clock.mark(timeline, free_delay()), timelines.snapshot(timeline)});
        leaving_pinned_.push_back(std::move(leaving));
        return;
      }
      pinned -= block->charged;
    } else {
      auto& memory = this->memory(block->device);
      ++counters.frees;
      collect();
      memory.allocated -= block->charged;
      Leaving leaving{block->device, block->charged, {}};
      for (const auto timeline : block->recorded)
        leaving.marks.push_back(clock.mark(timeline, free_delay()));
      leaving_.push_back(std::move(leaving));
      if (block->recorded.empty()) {
        leaving_.pop_back();
        memory.held -= block->charged;
        memory.pool(block->charged).held -= block->charged;
        held_changed(block->device, clock.now());
      } else {
        collect();
      }
    }
    drop(block);
  } catch (const std::exception& error) {  // a deleter cannot throw
    found(error.what());
  }
}

void Machine::drop(Block* block) {
  if (--block->owners == 0) delete block;
}

// --- operations

void Machine::land(Copy* copy) {
  const auto found = std::find_if(copies_.begin(), copies_.end(), [copy](const auto& other) {
    return other.get() == copy;
  });
  const auto owned = std::move(*found);  // no longer in flight, whatever becomes of it
  copies_.erase(found);
  Block* const blocks[] = {copy->source_block, copy->target_block};
  for (auto* const block : blocks) {
    if (!block) continue;
    auto& copies = block->copies;
    copies.erase(std::remove(copies.begin(), copies.end(), copy), copies.end());
  }
  try {
    if (copy->arrive) copy->arrive();
    std::memcpy(copy->target, copy->source, copy->nbytes);
  } catch (...) {
    for (auto* const block : blocks)
      if (block) drop(block);
    throw;
  }
  for (auto* const block : blocks)
    if (block) drop(block);
}

void Machine::land_passed() {
  for (size_t index = 0; index < copies_.size();) {
    if (timelines.host_passed(copies_[index]->use))
      land(copies_[index].get());
    else
      ++index;
  }
}

void Machine::add_copy(Copy copy) {
  copies_.push_back(std::make_unique<Copy>(copy));
  for (auto* const block : {copy.source_block, copy.target_block}) {
    if (!block) continue;
    ++block->owners;
    block->copies.push_back(copies_.back().get());
  }
}

void Machine::use(
    Block* block, size_t begin, size_t end, bool write, const Use& use,
    std::vector<Conflict>& conflicts) {
  if (!block->copies.empty()) {
    // What comes after a copy and touches its bytes must see them moved.
    const auto* const first = static_cast<const char*>(block->data) + begin;
    const auto* const last = static_cast<const char*>(block->data) + end;
    const std::vector<Copy*> copies(block->copies.begin(), block->copies.end());
    for (auto* const copy : copies) {
      const auto overlaps = [&](const char* from) {
        return from < last && from + copy->nbytes > first;
      };
      if (timelines.ordered(copy->use, use.timeline) &&
          ((copy->source_block == block && overlaps(copy->source)) ||
           (copy->target_block == block && overlaps(copy->target))))
        land(copy);
    }
  }
  if (races == Races::off) return;
  if (write && !block->inherited.empty()) check_reuse(block, use);
  block->history.use(begin, end, write, use, timelines, [&](const Conflict& conflict) {
    conflicts.push_back(conflict);
  });
}

void Machine::launch(
    uint32_t timeline, Kind kind, const char* name, uint64_t sequence, size_t nbytes, int peer) {
  const auto& costs = clock.costs;
  const auto bytes = static_cast<double>(nbytes);
  clock.spend(costs.launch, name, nbytes);
  switch (kind) {
    case Kind::kernel:
      ++counters.kernels;
      clock.launch(
          timeline, Engine::compute, costs.kernel + bytes / costs.device_bandwidth, name, nbytes);
      break;
    case Kind::copy_in:
      ++counters.copies_in;
      counters.bytes_in += static_cast<int64_t>(nbytes);
      clock.launch(
          timeline, Engine::copy_in, costs.transfer + bytes / costs.copy_in_bandwidth, name,
          nbytes);
      break;
    default:  // out of this device, to the host or to a peer
      auto& copies = kind == Kind::copy_out ? counters.copies_out : counters.copies_peer;
      auto& total = kind == Kind::copy_out ? counters.bytes_out : counters.bytes_peer;
      ++copies;
      total += static_cast<int64_t>(nbytes);
      clock.launch(
          timeline, Engine::copy_out, costs.transfer + bytes / costs.copy_out_bandwidth, name,
          nbytes);
  }
  if (issue_log) {
    const auto id = timeline <= static_cast<uint32_t>(device_count_) ? 0 : timeline;
    issued.push_back({name, kind, devices_[timeline], id, sequence, nbytes, clock.now()});
    if (issued.size() > kIssuedCapacity) issued.pop_front();
  }
}

std::string Machine::conflict(
    const Conflict& conflict, const Block& block, const Use& use, bool write, size_t begin,
    size_t end, const std::string& tensor) const {
  std::ostringstream text;
  text << "race: " << use.name;
  if (use.timeline != kHost) text << " #" << use.sequence;
  text << " on " << describe(use.timeline) << (write ? " writes" : " reads") << " bytes [" << begin
       << ", " << end << ") of allocation " << block.number << " (" << block.nbytes << " bytes, ";
  if (block.device == kPinned)
    text << "pinned host memory";
  else
    text << "simulated:" << block.device;
  if (!tensor.empty()) text << "; tensor " << tensor;
  const auto& earlier = conflict.earlier;
  text << "), and nothing orders it after " << earlier.name << " #" << earlier.sequence << " on "
       << describe(earlier.timeline)
       << (conflict.earlier_wrote ? ", which writes bytes [" : ", which reads bytes [")
       << conflict.begin << ", " << conflict.end << ") of it";
  return text.str();
}

void Machine::found(std::string text) {
  if (violations.size() == kViolations) {
    if (raised_ == 0) return;  // the first ones say the most
    violations.erase(violations.begin());
    --raised_;
  }
  violations.push_back(std::move(text));
}

void Machine::raise_found() {
  if (races != Races::raise || raised_ >= violations.size()) return;
  const auto text = violations[raised_++];
  TORCH_CHECK(false, "simulated accelerator: ", text);
}

void Machine::reset() {
  auto guard = lock();
  const auto before = races;
  races = Races::off;
  capturing = false;
  sync_debug = 0;
  for (int device = 0; device < device_count_; ++device) host_wait_device(device);
  races = before;
  while (!copies_.empty()) land(copies_.front().get());
  collect();
  empty_host_cache();
  clock.restart();
  violations.clear();
  raised_ = 0;
  counters = {};
  issued.clear();
  pinned_peak = pinned;
  for (auto& memory : memory_) {
    memory.allocated_peak = memory.allocated;
    memory.empty_cache();
    memory.held_peak = memory.reserved_peak = memory.active_peak = memory.held;
    memory.timeline.clear();
  }
}

}  // namespace swap_adam
