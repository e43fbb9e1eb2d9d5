#include "generator.h"

#include <ATen/Utils.h>
#include <ATen/core/DistributionsHelper.h>
#include <ATen/ops/empty.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <deque>

namespace swap_adam {

namespace {

// The numbers are the CPU's of the same seed. The state is what torch expects of an accelerator's:
// 16 bytes, a seed and an offset, which DTensor's random operations move about. The offset counts
// what the engine has drawn. torch keeps the second half of a pair of normal numbers for the next
// call; where there is one, the bits above say how long ago it was drawn.
class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(int device, c10::intrusive_ptr<at::CPUGeneratorImpl> cpu)
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)), known_(cpu_->engine()) {}

  void set_current_seed(uint64_t seed) override {
    cpu_->set_current_seed(seed);
    restarted();
  }
  uint64_t seed() override {
    const auto seed = cpu_->seed();
    restarted();
    return seed;
  }
  uint64_t current_seed() const override { return cpu_->current_seed(); }
  void set_offset(uint64_t offset) override { set(cpu_->current_seed(), offset); }
  uint64_t get_offset() const override {
    const auto drawn = position();
    const auto half = cpu_->next_double_normal_sample();
    if (!half) return drawn;
    const auto ago = drawn - drawn_at(*half, drawn);
    if (ago < kLongestAgo) return drawn | (ago + 1) << kPositionBits;
    TORCH_WARN("the generator's state does not hold the second half of a pair of normal numbers: "
               "it was drawn too long ago");
    return drawn;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(
        state.numel() == 16, "the state of a simulated device's generator has 16 bytes, a seed and "
        "an offset, not ", state.numel());
    uint64_t words[2];
    std::memcpy(words, state.data(), sizeof(words));
    set(words[0], words[1]);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    const uint64_t words[] = {current_seed(), get_offset()};
    auto state = at::empty({16}, at::TensorOptions(at::kByte).device(at::kCPU));
    std::memcpy(state.mutable_data_ptr(), words, sizeof(words));
    return state.getIntrusivePtr();
  }
  at::CPUGeneratorImpl* cpu() const { return cpu_.get(); }

 private:
  static constexpr int kPositionBits = 44;
  static constexpr uint64_t kLongestAgo = 1 << 16, kPair = 4;  // 32-bit draws in a pair of doubles

  DeviceGenerator* clone_impl() const override {
    auto cpu = c10::make_intrusive<at::CPUGeneratorImpl>();
    cpu->set_state(*cpu_->get_state());
    return new DeviceGenerator(device().index(), std::move(cpu), known_, known_position_);
  }
  DeviceGenerator(
      int device, c10::intrusive_ptr<at::CPUGeneratorImpl> cpu, at::mt19937 known, uint64_t position)
      : DeviceGenerator(device, std::move(cpu)) {
    known_ = known;
    known_position_ = position;
  }

  void restarted() {
    known_ = cpu_->engine();
    known_position_ = 0;
  }

  // How much the engine has drawn since its seed: found by drawing the same again from where it was
  // known last, since the kernels do not count.
  uint64_t position() const {
    const auto now = cpu_->engine().data();
    auto at = known_.data();
    auto& drawn = known_position_;
    while (at.state_ != now.state_) {
      for (int left = at.left_; left > 0; --left) known_();
      drawn += static_cast<uint64_t>(at.left_);
      at = known_.data();
    }
    for (auto left = now.next_ - at.next_; left > 0; --left) {
      known_();
      ++drawn;
    }
    return drawn;
  }

  at::mt19937 engine_at(uint64_t seed, uint64_t position) const {
    auto engine = known_;
    auto drawn = known_position_;
    if (engine.seed() != seed || drawn > position) {
      engine = at::mt19937(seed);
      drawn = 0;
    }
    for (; drawn < position; ++drawn) engine();
    return engine;
  }

  static double half_after(const at::mt19937& engine) {
    at::CPUGeneratorImpl generator;
    generator.set_engine(engine);
    at::normal_distribution<double> normal(0, 1);
    normal(&generator);
    return *generator.next_double_normal_sample();
  }

  // The position at which torch had drawn the pair with this half; the latest of those possible.
  uint64_t drawn_at(double half, uint64_t position) const {
    if (half_position_ <= position && half_position_ >= kPair &&
        half_after(engine_at(current_seed(), half_position_ - kPair)) == half)
      return half_position_;
    const auto seed = current_seed();
    if (position >= kPair && half_after(engine_at(seed, position - kPair)) == half)
      return half_position_ = position;
    auto start = position > kLongestAgo + kPair ? position - kLongestAgo - kPair : 0;
    auto engine = engine_at(seed, start);
    for (; start + kPair <= position; ++start, engine())
      if (half_after(engine) == half) return half_position_ = start + kPair;
    return 0;
  }

  void set(uint64_t seed, uint64_t offset) {
    const auto position = offset & ((uint64_t{1} << kPositionBits) - 1);
    const auto ago = offset >> kPositionBits;  // 0: no half
    std::optional<double> half;
    if (ago > 0 && position >= ago - 1 + kPair)
      half = half_after(engine_at(seed, position - (ago - 1) - kPair));
    known_ = engine_at(seed, position);
    known_position_ = position;
    cpu_->set_engine(known_);
    cpu_->set_next_float_normal_sample(std::nullopt);
    cpu_->set_next_double_normal_sample(half);
  }

  c10::intrusive_ptr<at::CPUGeneratorImpl> cpu_;
  mutable at::mt19937 known_;  // the engine when it had drawn `known_position_` numbers
  mutable uint64_t known_position_ = 0, half_position_ = 0;
};

}  // namespace

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device, c10::make_intrusive<at::CPUGeneratorImpl>());
}

const at::Generator& default_generator(int device) {
  static auto* const generators = [] {
    auto* const made = new std::deque<at::Generator>;
    for (int index = 0; index < 64; ++index) made->push_back(new_generator(index));
    return made;
  }();
  return (*generators)[static_cast<size_t>(device)];
}

at::CPUGeneratorImpl* cpu_generator_of(const at::Generator& generator) {
  if (generator.device().type() == c10::DeviceType::CPU)
    return generator.get<at::CPUGeneratorImpl>();
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

}  // namespace swap_adam
