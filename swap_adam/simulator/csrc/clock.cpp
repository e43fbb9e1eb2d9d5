#include "clock.h"

#include <algorithm>

namespace swap_adam {

namespace {
constexpr Seconds kMark = -1, kWait = -2;
}

void Clock::record(Span span) {
  if (trace_capacity == 0) return;
  if (trace.size() >= trace_capacity) trace.pop_front();
  trace.push_back(span);
}

void Clock::spend(Seconds time, const char* name, size_t nbytes) {
  record({name, now_, now_ + time, nbytes, kHostLane, Engine::compute});
  now_ += time;
}

void Clock::add_stream(int device) {
  lanes_.push_back({});
  lanes_.back().device = device;
  if (engine_free_.size() < static_cast<size_t>(device + 1) * kEngines)
    engine_free_.resize(static_cast<size_t>(device + 1) * kEngines, 0);
}

void Clock::push(uint32_t stream, Entry entry) {
  auto& lane = lanes_[stream];
  entry.issued = now_;
  entry.order = ++order_;
  lane.entries.push_back(std::move(entry));
  if (lane.entries.size() == 1) settle(stream);
  // Keeps the queues short in a long run that never waits; the result does not depend on it.
  if ((order_ & 255) == 0) advance();
}

void Clock::launch(
    uint32_t stream, Engine engine, Seconds duration, const char* name, size_t nbytes) {
  Entry entry;
  entry.engine = engine;
  entry.duration = duration;
  entry.name = name;
  entry.nbytes = nbytes;
  push(stream, std::move(entry));
}

MarkPtr Clock::mark(uint32_t stream, Seconds delay) {
  Entry entry;
  entry.duration = kMark;
  entry.delay = delay;
  entry.mark = std::make_shared<Mark>();
  auto mark = entry.mark;
  push(stream, std::move(entry));
  return mark;
}

void Clock::wait(uint32_t stream, const MarkPtr& mark) {
  Entry entry;
  entry.duration = kWait;
  entry.mark = mark;
  push(stream, std::move(entry));
}

void Clock::settle(uint32_t stream) {
  // A settled mark may free other streams: a work list, not recursion, for long chains.
  std::vector<uint32_t> work{stream};
  while (!work.empty()) {
    const auto index = work.back();
    work.pop_back();
    auto& lane = lanes_[index];
    while (!lane.entries.empty()) {
      auto& head = lane.entries.front();
      if (head.duration == kMark) {
        head.mark->settled = true;
        head.mark->run = run_;
        head.mark->time = lane.end = std::max(lane.end, head.issued) + head.delay;
        work.insert(work.end(), head.mark->waiting.begin(), head.mark->waiting.end());
        head.mark->waiting.clear();
      } else if (head.duration == kWait) {
        if (!head.mark->settled) {
          head.mark->waiting.push_back(index);
          break;
        }
        lane.end = std::max({lane.end, head.issued, time(head.mark)});
      } else {
        ready_.push({std::max(lane.end, head.issued), head.order, index});
        break;
      }
      lane.entries.pop_front();
    }
  }
}

void Clock::commit() {
  const auto next = ready_.top();
  ready_.pop();
  auto& lane = lanes_[next.lane];
  auto& head = lane.entries.front();
  auto engine = head.engine;
  if (engine == Engine::copy_out && !costs.duplex) engine = Engine::copy_in;
  auto& free = engine_free_[static_cast<size_t>(lane.device) * kEngines + static_cast<int>(engine)];
  const auto start = std::max(next.time, free);
  lane.end = free = start + head.duration;
  record({head.name, start, lane.end, head.nbytes, next.lane, engine});
  lane.entries.pop_front();
  settle(next.lane);
}

void Clock::run_until(Seconds time) {
  while (!ready_.empty() && ready_.top().time <= time) commit();
}

bool Clock::passed(const MarkPtr& mark) {
  advance();
  return mark->settled && time(mark) <= now_;
}

void Clock::block(const MarkPtr& mark) {
  // Nothing new is issued while the host is blocked, so running ahead of its clock is exact here.
  while (!mark->settled) commit();
  now_ = std::max(now_, time(mark));
}

void Clock::restart() {
  ++run_;
  now_ = 0;
  for (auto& lane : lanes_) lane.end = 0;
  std::fill(engine_free_.begin(), engine_free_.end(), 0);
  trace.clear();
}

}  // namespace swap_adam
