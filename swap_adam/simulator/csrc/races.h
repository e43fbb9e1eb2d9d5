// Vector clocks: which operations are ordered, and which bytes each of them used.
//
// Timeline 0 is the host (all of its threads), every stream is one more. An operation is a timeline
// and a sequence number in it. Only the operations of streams need to be remembered: whatever the
// host does is over when it issues the next thing. What the host has waited for is known to
// everything issued later, so it is kept once, and forgotten in the streams and the histories.
#pragma once

#include <c10/util/SmallVector.h>

#include <cstdint>
#include <utility>
#include <vector>

namespace swap_adam {

constexpr uint32_t kHost = 0;

struct Use {
  uint32_t timeline = kHost;
  uint64_t sequence = 0;
  const char* name = nullptr;  // of the operation; nullptr: no use
};

// The latest operation of each other timeline that a point in a timeline comes after.
using Known = c10::SmallVector<std::pair<uint32_t, uint64_t>, 4>;

struct Conflict {
  Use earlier;
  bool earlier_wrote;
  size_t begin, end;
};

class Timelines {
 public:
  void add() {
    host_.push_back(0);
    known_.emplace_back();
    sequence_.push_back(0);
  }
  size_t size() const { return host_.size(); }
  uint64_t next(uint32_t timeline) { return ++sequence_[timeline]; }
  uint64_t latest(uint32_t timeline) const { return sequence_[timeline]; }
  bool host_passed(const Use& use) const { return use.sequence <= host_[use.timeline]; }

  // Whether what `timeline` does next comes after `use`.
  bool ordered(const Use& use, uint32_t timeline) const {
    if (use.timeline == timeline || host_passed(use)) return true;
    for (const auto& [other, sequence] : known_[timeline])
      if (other == use.timeline) return use.sequence <= sequence;
    return false;
  }

  // Whether the host knows of all that this timeline did and waited for.
  bool host_knows(uint32_t timeline) const {
    for (const auto& [other, sequence] : known_[timeline])
      if (sequence > host_[other]) return false;
    return sequence_[timeline] <= host_[timeline];
  }

  // Everything that comes before what `timeline` does next, itself included.
  Known snapshot(uint32_t timeline) {
    forget(known_[timeline]);
    Known result = known_[timeline];
    result.emplace_back(timeline, sequence_[timeline]);
    return result;
  }

  void join(uint32_t timeline, const Known& other) {
    if (timeline == kHost) {
      for (const auto& [index, sequence] : other)
        if (sequence > host_[index]) host_[index] = sequence;
      return;
    }
    auto& mine = known_[timeline];
    for (const auto& [index, sequence] : other) {
      if (index == timeline || sequence <= host_[index]) continue;
      auto found = mine.begin();
      while (found != mine.end() && found->first != index) ++found;
      if (found == mine.end())
        mine.emplace_back(index, sequence);
      else if (sequence > found->second)
        found->second = sequence;
    }
  }

 private:
  void forget(Known& known) const {
    size_t kept = 0;
    for (const auto& entry : known)
      if (entry.second > host_[entry.first]) known[kept++] = entry;
    known.resize(kept);
  }

  std::vector<uint64_t> host_{0}, sequence_{0};
  std::vector<Known> known_{1};
};

// The uses of one allocation that somebody may still have to be ordered after, by byte range.
class History {
 public:
  // Notes the use and appends what it is not ordered after. The host's uses are only checked.
  template <typename OnConflict>
  void use(
      size_t begin, size_t end, bool write, const Use& use, const Timelines& timelines,
      OnConflict&& on_conflict);

  template <typename OnUse>
  void each(OnUse&& on_use) const {
    for (const auto& segment : segments_) {
      if (segment.write.name) on_use(segment.write, true, segment.begin, segment.end);
      for (const auto& read : segment.reads) on_use(read, false, segment.begin, segment.end);
    }
  }
  void clear() { segments_.clear(); }

 private:
  struct Segment {
    size_t begin, end;
    Use write;
    c10::SmallVector<Use, 1> reads;
  };

  template <typename OnConflict>
  static void check(
      const Segment& segment, size_t begin, size_t end, bool write, uint32_t by,
      const Timelines& timelines, OnConflict& on_conflict) {
    const auto first = segment.begin > begin ? segment.begin : begin;
    const auto last = segment.end < end ? segment.end : end;
    if (segment.write.name && !timelines.ordered(segment.write, by))
      on_conflict(Conflict{segment.write, true, first, last});
    if (!write) return;
    for (const auto& read : segment.reads)
      if (!timelines.ordered(read, by)) on_conflict(Conflict{read, false, first, last});
  }

  // A read that comes after another one stands for it: what follows the later follows both.
  static void add_read(Segment& segment, const Use& use, const Timelines& timelines) {
    size_t kept = 0;
    for (const auto& read : segment.reads)
      if (!timelines.ordered(read, use.timeline)) segment.reads[kept++] = read;
    segment.reads.resize(kept);
    segment.reads.push_back(use);
    if (segment.write.name && timelines.host_passed(segment.write)) segment.write.name = nullptr;
  }

  size_t find(size_t begin) const {  // the first segment that ends after `begin`
    size_t low = 0, high = segments_.size();
    while (low < high) {
      const auto middle = (low + high) / 2;
      if (segments_[middle].end > begin) high = middle; else low = middle + 1;
    }
    return low;
  }

  void forget_passed(const Timelines& timelines) {
    size_t kept = 0;
    for (auto& segment : segments_) {
      bool open = segment.write.name && !timelines.host_passed(segment.write);
      for (const auto& read : segment.reads) open = open || !timelines.host_passed(read);
      if (!open) continue;
      if (&segments_[kept] != &segment) segments_[kept] = std::move(segment);
      ++kept;
    }
    segments_.resize(kept);
    sweep_at_ = 2 * kept + 64;
  }

  std::vector<Segment> segments_;  // sorted, disjoint
  size_t sweep_at_ = 64;
};

template <typename OnConflict>
void History::use(
    size_t begin, size_t end, bool write, const Use& use, const Timelines& timelines,
    OnConflict&& on_conflict) {
  if (begin >= end) return;
  const auto by = use.timeline;
  if (segments_.size() > sweep_at_) forget_passed(timelines);
  auto at = find(begin);
  if (by == kHost) {
    for (; at < segments_.size() && segments_[at].begin < end; ++at)
      check(segments_[at], begin, end, write, by, timelines, on_conflict);
    return;
  }
  // The common case, one tensor in one allocation, changes one segment in place.
  if (at < segments_.size() && segments_[at].begin == begin && segments_[at].end == end) {
    auto& segment = segments_[at];
    check(segment, begin, end, write, by, timelines, on_conflict);
    if (write) {
      segment.reads.clear();
      segment.write = use;
    } else {
      add_read(segment, use, timelines);
    }
    return;
  }
  const auto insert = [&](size_t index, Segment segment) {
    segments_.insert(segments_.begin() + static_cast<std::ptrdiff_t>(index), std::move(segment));
  };
  if (at < segments_.size() && segments_[at].begin < begin) {  // cut the first at `begin`
    auto left = segments_[at];
    left.end = begin;
    segments_[at].begin = begin;
    insert(at++, std::move(left));
  }
  const auto first = at;
  auto position = begin;
  while (position < end) {
    if (at == segments_.size() || segments_[at].begin >= end) {  // nothing more up to `end`
      if (!write) insert(at++, Segment{position, end, {}, {use}});
      break;
    }
    if (segments_[at].begin > position) {  // a gap
      const auto next = segments_[at].begin;
      if (!write) insert(at++, Segment{position, next, {}, {use}});
      position = next;
      continue;
    }
    if (segments_[at].end > end) {  // cut the last at `end`
      auto right = segments_[at];
      right.begin = end;
      segments_[at].end = end;
      insert(at + 1, std::move(right));
    }
    check(segments_[at], begin, end, write, by, timelines, on_conflict);
    if (!write) add_read(segments_[at], use, timelines);
    position = segments_[at++].end;
  }
  if (!write) return;
  if (at == first) {
    insert(first, Segment{begin, end, use, {}});
    return;
  }
  segments_[first] = Segment{begin, end, use, {}};
  segments_.erase(
      segments_.begin() + static_cast<std::ptrdiff_t>(first + 1),
      segments_.begin() + static_cast<std::ptrdiff_t>(at));
}

}  // namespace swap_adam
