// The virtual clock: a lazy discrete-event simulation of the engines of every device.
//
// An operation starts when its stream has reached it and its engine is free; among those that wait
// for one engine, the one that became ready first goes first (ties: the one issued first). A start
// time is fixed only once the host's clock has passed the moment the operation became ready: until
// then the host might still issue, on another stream, something that is ready earlier.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <queue>
#include <vector>

namespace swap_adam {

using Seconds = double;

// What everything costs; filled in from costs.py, the one table of these numbers. Bandwidths are in
// bytes per second.
struct Costs {
  double copy_in_bandwidth = 25e9;
  double copy_out_bandwidth = 25e9;
  double device_bandwidth = 1500e9;
  double host_bandwidth = 40e9;
  Seconds launch = 4e-6;    // host, per kernel or transfer
  Seconds kernel = 2e-6;    // compute engine, on top of its bytes
  Seconds transfer = 3e-6;  // copy engine, on top of its bytes
  Seconds wait = 5e-6;      // host, per blocking wait, on top of what it waits for
  Seconds event = 0.5e-6;   // host, per event record, stream wait or query
  bool duplex = true;       // false: both directions share one copy engine
};

enum class Engine : uint8_t { compute, copy_in, copy_out };
constexpr int kEngines = 3;

// A point in a stream. `time` is when the stream passes it, once that is settled.
struct Mark {
  bool settled = false;
  uint32_t run = 0;  // restarts before it was settled; an earlier run is over at time 0
  Seconds time = 0;
  std::vector<uint32_t> waiting;  // streams whose next entry waits for it
};
using MarkPtr = std::shared_ptr<Mark>;

// One box of the trace; `lane` is a stream for engines, `host_lane` for the host.
struct Span {
  const char* name;
  Seconds start, end;
  size_t nbytes;
  uint32_t lane;
  Engine engine;
};
constexpr uint32_t kHostLane = 0;

class Clock {
 public:
  Costs costs;
  size_t trace_capacity = 200000;  // spans kept, the oldest go first; 0 keeps none
  std::deque<Span> trace;

  Seconds now() const { return now_; }
  void spend(Seconds time, const char* name, size_t nbytes = 0);  // the host is busy
  void add_stream(int device);
  void launch(uint32_t stream, Engine engine, Seconds duration, const char* name, size_t nbytes);
  // `delay`: of work of the stream's own that the mark stands behind.
  MarkPtr mark(uint32_t stream, Seconds delay = 0);
  void wait(uint32_t stream, const MarkPtr& mark);
  void advance() { run_until(now_); }
  bool idle(uint32_t stream) const {
    return lanes_[stream].entries.empty() && lanes_[stream].end <= now_;
  }
  bool passed(const MarkPtr& mark);  // by now
  void block(const MarkPtr& mark);   // the host waits for it; the cost of waiting is the caller's
  Seconds time(const MarkPtr& mark) const { return mark->run == run_ ? mark->time : 0; }
  void restart();                    // time 0; everything issued must have been waited for

 private:
  struct Entry {
    Engine engine = Engine::compute;
    Seconds duration = 0, issued = 0, delay = 0;
    uint64_t order = 0;
    const char* name = nullptr;
    size_t nbytes = 0;
    MarkPtr mark;  // with duration < 0 a mark to settle or, with duration -2, to wait for
  };
  struct Lane {
    int device = 0;
    Seconds end = 0;  // when everything settled so far is over
    std::deque<Entry> entries;
  };
  struct Ready {
    Seconds time;
    uint64_t order;
    uint32_t lane;
    bool operator<(const Ready& other) const {  // for a max-heap whose top is the earliest
      return time != other.time ? time > other.time : order > other.order;
    }
  };

  void push(uint32_t stream, Entry entry);
  void settle(uint32_t stream);  // marks and waits at the head, up to the next operation
  void commit();                 // the operation that became ready first
  void run_until(Seconds time);
  void record(Span span);

  Seconds now_ = 0;
  uint32_t run_ = 0;
  uint64_t order_ = 0;
  std::vector<Lane> lanes_{1};               // [0] is the host, unused
  std::vector<Seconds> engine_free_;         // device * kEngines + engine
  std::priority_queue<Ready> ready_;
};

}  // namespace swap_adam
