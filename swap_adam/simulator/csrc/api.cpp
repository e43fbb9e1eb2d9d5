// What the Python side calls, through torch.ops.swap_adam_simulator.
#include <torch/library.h>

#include <set>
#include <sstream>

#include "generator.h"
#include "lowering.h"
#include "tensors.h"

namespace swap_adam {

void watch_host();
void register_collectives();

namespace {

Machine& machine() { return Machine::get(); }

void start(int64_t device_count) {
  const bool first = machine().device_count() == 0;
  machine().start(static_cast<int>(device_count));
  if (!first) return;
  register_lowering();
  watch_host();
  register_collectives();
}

int64_t device_count() { return machine().device_count(); }

// The numbers of costs.py, bandwidths in bytes per second, times in seconds.
void set_costs(at::ArrayRef<double> numbers, bool duplex) {
  TORCH_CHECK(numbers.size() == 9, "9 numbers expected");
  auto guard = machine().lock();
  machine().clock.advance();
  auto& costs = machine().clock.costs;
  double* const fields[] = {
      &costs.copy_in_bandwidth, &costs.copy_out_bandwidth, &costs.device_bandwidth,
      &costs.host_bandwidth, &costs.launch, &costs.kernel, &costs.transfer, &costs.wait,
      &costs.event};
  for (size_t at = 0; at < numbers.size(); ++at) *fields[at] = numbers[at];
  costs.duplex = duplex;
}

void set_capacity(int64_t device, int64_t nbytes) {
  auto guard = machine().lock();
  auto& memory = machine().memory(static_cast<int>(device));
  memory.capacity = static_cast<size_t>(nbytes);
  machine().collect();
  memory.empty_cache();
}
void set_pinned_capacity(int64_t nbytes) {
  machine().pinned_capacity = static_cast<size_t>(nbytes);
}
void set_races(int64_t mode) { machine().races = static_cast<Races>(mode); }
void set_strict(int64_t bits) { machine().set_strict(static_cast<uint32_t>(bits)); }
void set_sync_debug(int64_t mode) { machine().sync_debug = static_cast<int>(mode); }
int64_t sync_debug() { return machine().sync_debug; }
void set_capturing(bool on) { machine().capturing = on; }
// Between two events, by torch.Event.event_id.
double elapsed(int64_t first, int64_t second) {
  return elapsed_ms(*reinterpret_cast<Event*>(first), *reinterpret_cast<Event*>(second));
}
void set_trace_capacity(int64_t spans) {
  auto guard = machine().lock();
  auto& clock = machine().clock;
  clock.trace_capacity = static_cast<size_t>(spans);
  while (clock.trace.size() > clock.trace_capacity) clock.trace.pop_front();
}

at::Generator generator(int64_t device) { return default_generator(static_cast<int>(device)); }

double now() { return machine().clock.now(); }
void spend(double seconds) {
  auto guard = machine().lock();
  machine().clock.spend(seconds, "host work");
}
void reset() { machine().reset(); }

// allocated, its peak, held, its peak, reserved, its peak, capacity, active, its peak; bytes
std::vector<int64_t> memory(int64_t device) {
  auto guard = machine().lock();
  machine().collect();
  const auto& memory = machine().memory(static_cast<int>(device));
  std::vector<int64_t> result;
  for (const auto value :
       {memory.allocated, memory.allocated_peak, memory.held, memory.held_peak, memory.reserved,
        memory.reserved_peak, memory.capacity, memory.active(), memory.active_peak})
    result.push_back(static_cast<int64_t>(value));
  return result;
}
void reset_peaks(int64_t device) {
  auto guard = machine().lock();
  machine().collect();
  auto& memory = machine().memory(static_cast<int>(device));
  memory.allocated_peak = memory.allocated;
  memory.held_peak = memory.held;
  memory.active_peak = memory.active();
  memory.reserved_peak = memory.reserved;
}
void empty_cache() {
  auto guard = machine().lock();
  machine().collect();
  for (int device = 0; device < machine().device_count(); ++device)
    machine().memory(device).empty_cache();
}
void empty_host_cache() { machine().empty_host_cache(); }
std::vector<int64_t> pinned() {
  return {static_cast<int64_t>(machine().pinned), static_cast<int64_t>(machine().pinned_peak)};
}
void reset_pinned_peak() { machine().pinned_peak = machine().pinned; }
// Pairs of time and held bytes.
std::vector<double> memory_timeline(int64_t device) {
  auto guard = machine().lock();
  machine().collect();
  std::vector<double> result;
  for (const auto& [time, held] : machine().memory(static_cast<int>(device)).timeline) {
    result.push_back(time);
    result.push_back(static_cast<double>(held));
  }
  return result;
}

std::vector<std::string> violations(bool clear) {
  auto guard = machine().lock();
  auto result = machine().violations;
  if (clear) machine().forget_found();
  return result;
}
std::vector<std::string> not_raised() {
  auto guard = machine().lock();
  return machine().not_raised();
}
std::vector<int64_t> counters() {
  const auto& c = machine().counters;
  return {c.copies_in, c.bytes_in, c.copies_out, c.bytes_out, c.copies_peer, c.bytes_peer,
          c.kernels, c.host_waits, c.device_synchronizations, c.allocations, c.frees,
          c.out_of_memory, c.timing_events};
}
void reset_counters() {
  auto guard = machine().lock();
  machine().counters = {};
}

void log_operations(bool on) {
  auto guard = machine().lock();
  machine().issue_log = on;
  machine().issued.clear();
}
// One operation a line: name, kind, device, stream, sequence, nbytes, time
std::string operations() {
  auto guard = machine().lock();
  std::ostringstream text;
  text.precision(17);
  for (const auto& one : machine().issued)
    text << one.name << '\t' << static_cast<int>(one.kind) << '\t' << one.device << '\t'
         << one.stream << '\t' << one.sequence << '\t' << one.nbytes << '\t' << one.time << '\n';
  return text.str();
}
// One span a line: name, engine (or -1 for the host), device, stream, start, end, nbytes
std::string trace() {
  auto guard = machine().lock();
  machine().clock.advance();
  std::ostringstream text;
  text.precision(17);
  for (const auto& span : machine().clock.trace) {
    const bool host = span.lane == kHostLane;
    text << span.name << '\t' << (host ? -1 : static_cast<int>(span.engine)) << '\t'
         << (host ? -1 : machine().stream(span.lane).device_index()) << '\t'
         << (host ? 0 : machine().stream(span.lane).id()) << '\t' << span.start << '\t'
         << span.end << '\t' << span.nbytes << '\n';
  }
  return text.str();
}

// For torch.save, which reads a storage behind the dispatcher's back.
void host_reads(int64_t address, int64_t nbytes, const std::string& name) {
  auto guard = machine().lock();
  const auto* const data = reinterpret_cast<const char*>(address);
  auto* const block = machine().pinned_block(data);
  if (!block) return;
  static auto* const names = new std::set<std::string>;
  const auto offset = static_cast<size_t>(data - static_cast<const char*>(block->data));
  Operation operation(kHost, names->insert(name).first->c_str());
  operation.use(block, offset, offset + static_cast<size_t>(nbytes), false);
  machine().raise_found();
}

}  // namespace

TORCH_LIBRARY(swap_adam_simulator, m) {
  m.def("start", &start);
  m.def("device_count", &device_count);
  m.def("set_costs(float[] numbers, bool duplex) -> ()", &set_costs);
  m.def("set_capacity", &set_capacity);
  m.def("set_pinned_capacity", &set_pinned_capacity);
  m.def("set_races", &set_races);
  m.def("set_strict", &set_strict);
  m.def("set_sync_debug", &set_sync_debug);
  m.def("sync_debug", &sync_debug);
  m.def("set_capturing", &set_capturing);
  m.def("elapsed_ms", &elapsed);
  m.def("set_trace_capacity", &set_trace_capacity);
  m.def("default_generator", &generator);
  m.def("now", &now);
  m.def("spend", &spend);
  m.def("reset", &reset);
  m.def("memory", &memory);
  m.def("reset_peaks", &reset_peaks);
  m.def("empty_cache", &empty_cache);
  m.def("empty_host_cache", &empty_host_cache);
  m.def("pinned", &pinned);
  m.def("reset_pinned_peak", &reset_pinned_peak);
  m.def("memory_timeline", &memory_timeline);
  m.def("violations", &violations);
  m.def("not_raised", &not_raised);
  m.def("counters", &counters);
  m.def("reset_counters", &reset_counters);
  m.def("log_operations", &log_operations);
  m.def("operations", &operations);
  m.def("trace", &trace);
  m.def("host_reads", &host_reads);
}

}  // namespace swap_adam
