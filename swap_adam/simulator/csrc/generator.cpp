#include "generator.h"

#include <c10/core/GeneratorImpl.h>

#include <deque>

namespace swap_adam {

namespace {

class DeviceGenerator final : public c10::GeneratorImpl {
 public:
  DeviceGenerator(int device, c10::intrusive_ptr<at::CPUGeneratorImpl> cpu)
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device)),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu_(std::move(cpu)) {}

  void set_current_seed(uint64_t seed) override { cpu_->set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu_->set_offset(offset); }
  uint64_t get_offset() const override { return cpu_->get_offset(); }
  uint64_t current_seed() const override { return cpu_->current_seed(); }
  uint64_t seed() override { return cpu_->seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu_->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_->get_state(); }
  at::CPUGeneratorImpl* cpu() const { return cpu_.get(); }

 private:
  DeviceGenerator* clone_impl() const override {
    auto cpu = c10::make_intrusive<at::CPUGeneratorImpl>();
    const auto state = cpu_->get_state();
    cpu->set_state(*state);
    return new DeviceGenerator(device().index(), std::move(cpu));
  }
  c10::intrusive_ptr<at::CPUGeneratorImpl> cpu_;
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
