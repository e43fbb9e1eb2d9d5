#include "lowering.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/List.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "generator.h"
#include "tensors.h"

namespace swap_adam {

namespace {

using Argument = OperatorFacts::Argument;

bool starts_with(std::string_view text, std::string_view with) {
  return text.substr(0, with.size()) == with;
}

const std::unordered_set<std::string_view> kOverwriting{
    "aten::zero_", "aten::fill_", "aten::normal_", "aten::uniform_", "aten::random_",
    "aten::bernoulli_", "aten::exponential_", "aten::log_normal_", "aten::cauchy_",
    "aten::geometric_", "aten::copy_", "aten::_foreach_zero_", "aten::_foreach_copy_"};

const std::unordered_set<std::string_view> kSynchronizing{
    "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
    "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave",
    "aten::_assert_async", "aten::bincount"};

// Indices may live on the CPU, as on CUDA; the list of scalars must.
const std::unordered_set<std::string_view> kIndexing{
    "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index"};

OperatorFacts work_out(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  OperatorFacts facts;
  auto full = schema.name();
  if (!schema.overload_name().empty()) full += "." + schema.overload_name();
  facts.name = (new std::string(std::move(full)))->c_str();  // histories and traces point to it
  const std::string_view base = schema.name();
  const bool overwriting = kOverwriting.count(base) != 0;
  const bool fused_optimizer = starts_with(base, "aten::_fused_adam");
  bool has_generator = false;
  int index = 0;
  for (const auto& argument : schema.arguments()) {
    OperatorFacts::Operand operand;
    auto type = argument.type();
    if (type->kind() == c10::TypeKind::OptionalType)
      type = type->castRaw<c10::OptionalType>()->getElementType();
    if (type->kind() == c10::TypeKind::TensorType) {
      operand.kind = Argument::tensor;
    } else if (type->kind() == c10::TypeKind::ListType) {
      auto element = type->castRaw<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::OptionalType)
        element = element->castRaw<c10::OptionalType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) operand.kind = Argument::tensors;
    } else if (type->kind() == c10::TypeKind::GeneratorType) {
      operand.kind = Argument::generator;
      has_generator = true;
    } else if (type->kind() == c10::TypeKind::DeviceObjType) {
      operand.kind = Argument::device;
    }
    if (const auto* const alias = argument.alias_info()) operand.write = alias->isWrite();
    operand.out = argument.is_out() && operand.write;
    operand.write_only = operand.out || (overwriting && operand.write);
    operand.gradient = fused_optimizer && argument.name() == "grads";
    operand.indices = kIndexing.count(base) != 0 && argument.name() == "indices";
    operand.anywhere = operand.indices || argument.name() == "scalars";
    if (argument.name() == "grad_scale") facts.grad_scale = index;
    facts.operands.push_back(operand);
    ++index;
  }
  for (const auto& result : schema.returns()) {
    int aliased = -1;
    if (const auto* const alias = result.alias_info()) {
      if (!alias->isWrite()) {
        facts.view = true;
      } else {
        for (size_t at = 0; at < schema.arguments().size(); ++at) {
          const auto* const other = schema.arguments()[at].alias_info();
          if (other && other->isWrite() && other->beforeSets() == alias->beforeSets())
            aliased = static_cast<int>(at);
        }
      }
    }
    facts.aliased.push_back(aliased);
    const auto kind = result.type()->kind();
    if (kind == c10::TypeKind::BoolType || kind == c10::TypeKind::IntType ||
        kind == c10::TypeKind::FloatType || kind == c10::TypeKind::NumberType)
      facts.synchronizes = true;
  }
  facts.synchronizes = facts.synchronizes || kSynchronizing.count(base) != 0;
  const auto tags = op.getTags();
  facts.seedless = !has_generator &&
      std::find(tags.begin(), tags.end(), at::Tag::nondeterministic_seeded) != tags.end();
  facts.has_cpu_kernel = op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
  return facts;
}

// Lends the device's random numbers to a kernel that asks for the CPU's default generator.
class LentGenerator {
 public:
  explicit LentGenerator(int device)
      : cpu_(at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator())),
        device_(cpu_generator_of(default_generator(device))),
        kept_(cpu_->clone()) {
    copy(*device_, *cpu_);
  }
  ~LentGenerator() {
    copy(*cpu_, *device_);
    copy(*kept_, *cpu_);
  }
  LentGenerator(const LentGenerator&) = delete;
  LentGenerator& operator=(const LentGenerator&) = delete;

 private:
  static void copy(at::CPUGeneratorImpl& from, at::CPUGeneratorImpl& to) {
    to.set_engine(from.engine());
    to.set_next_float_normal_sample(from.next_float_normal_sample());
    to.set_next_double_normal_sample(from.next_double_normal_sample());
  }
  at::CPUGeneratorImpl* cpu_;
  at::CPUGeneratorImpl* device_;
  std::shared_ptr<at::CPUGeneratorImpl> kept_;
};

class Lowering {
 public:
  Lowering(const c10::OperatorHandle& op, const OperatorFacts& facts, torch::jit::Stack& stack)
      : op_(op), facts_(facts), stack_(stack), count_(facts.operands.size()) {}

  void run() {
    first_ = stack_.size() - count_;
    find_device();
    if (facts_.view) {
      replace_arguments();
      call();
      replace_returns();
      return;
    }
    Operation operation(device_, facts_.name);
    for (size_t at = 0; at < count_; ++at) use(operation, at);
    operation.run();
    replace_arguments();
    call();
    replace_returns();
    for (const auto& tensor : made_) {
      operation.produced(tensor);
      nbytes_ += traffic(tensor);
    }
    if (nbytes_ == 0 && !factory_) return;  // nothing but empty tensors: no kernel
    operation.issue(Kind::kernel, nbytes_);
    if (facts_.synchronizes || masked_) operation.host_waits();
  }

 private:
  template <typename OnTensor>
  static void each_tensor(const c10::IValue& value, OnTensor&& on_tensor) {
    if (value.isTensor()) {
      if (value.toTensor().defined()) on_tensor(value.toTensor());
    } else if (value.isList()) {
      for (const auto& element : value.toListRef())
        if (element.isTensor() && element.toTensor().defined()) on_tensor(element.toTensor());
    }
  }

  void find_device() {
    for (size_t at = 0; at < count_; ++at) {
      const auto& operand = facts_.operands[at];
      const auto& value = stack_[first_ + at];
      if (operand.kind == Argument::tensor || operand.kind == Argument::tensors) {
        each_tensor(value, [&](const at::Tensor& tensor) {
          if (on_device(tensor) && device_ < 0) device_ = tensor.device().index();
        });
      } else if (operand.kind == Argument::device && value.isDevice() && device_ < 0) {
        const auto device = value.toDevice();
        if (device.type() == c10::DeviceType::PrivateUse1) {
          device_ = device.has_index() ? device.index() : current_device();
          factory_ = true;
        }
      }
    }
    TORCH_CHECK(device_ >= 0, facts_.name, " has no simulated tensor to find its device from");
  }

  void check_device(const at::Tensor& tensor, const OperatorFacts::Operand& operand) const {
    if (on_device(tensor) ? tensor.device().index() == device_
                          : operand.anywhere || (tensor.dim() == 0 && !operand.write))
      return;
    TORCH_CHECK(
        false, facts_.name, ": expected all tensors to be on the same device, but found at least "
        "two devices, simulated:", device_, " and ", tensor.device(), "!");
  }

  void use(Operation& operation, size_t at) {
    const auto& operand = facts_.operands[at];
    if (operand.kind != Argument::tensor && operand.kind != Argument::tensors) return;
    bool write = operand.write;
    if (operand.gradient && facts_.grad_scale >= 0)
      write = write && !stack_[first_ + static_cast<size_t>(facts_.grad_scale)].isNone();
    each_tensor(stack_[first_ + at], [&](const at::Tensor& tensor) {
      check_device(tensor, operand);
      // A mask becomes indices first, as many as the data says.
      if (operand.indices)
        masked_ = masked_ || tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte;
      if (!on_device(tensor)) return;
      operation.use(tensor, write);
      const auto nbytes = traffic(tensor);
      nbytes_ += nbytes * (write && !operand.write_only ? 2 : 1);
    });
  }

  at::Tensor alias(const at::Tensor& tensor, const OperatorFacts::Operand& operand) {
    if (!on_device(tensor)) return tensor;
    if (!tensor.unsafeGetTensorImpl()->has_storage()) {
      TORCH_CHECK_NOT_IMPLEMENTED(
          false, facts_.name, " is not implemented for ", tensor.layout(),
          " tensors on the simulated accelerator");
    }
    if (operand.out) {
      auto result = resizable_alias(tensor);
      outs_.emplace_back(tensor, result);
      return result;
    }
    auto result = cpu_alias(tensor);
    const auto* const storage = result.storage().unsafeGetStorageImpl();
    if (result.storage().data_ptr().get() != nullptr)
      aliases_.emplace_back(storage, &tensor);
    return result;
  }

  void replace_arguments() {
    kept_.reserve(count_);
    for (size_t at = 0; at < count_; ++at) {
      const auto& operand = facts_.operands[at];
      auto& value = stack_[first_ + at];
      kept_.push_back(value);
      const auto& kept = kept_.back();
      if (operand.kind == Argument::tensor) {
        if (kept.isTensor() && kept.toTensor().defined()) value = alias(kept.toTensor(), operand);
      } else if (operand.kind == Argument::tensors && kept.isTensorList()) {
        c10::List<at::Tensor> list;
        const auto elements = kept.toListRef();
        list.reserve(elements.size());
        for (const auto& element : elements) {
          const auto& tensor = element.toTensor();
          list.push_back(tensor.defined() ? alias(tensor, operand) : tensor);
        }
        value = std::move(list);
      } else if (operand.kind == Argument::tensors && kept.isList()) {
        c10::List<std::optional<at::Tensor>> list;
        for (const auto& element : kept.toListRef()) {
          if (element.isTensor() && element.toTensor().defined())
            list.push_back(alias(element.toTensor(), operand));
          else
            list.push_back(std::nullopt);
        }
        value = std::move(list);
      } else if (operand.kind == Argument::generator) {
        auto* const generator = cpu_generator_of(
            kept.isNone() ? default_generator(device_) : kept.toGenerator());
        value = at::Generator(
            c10::intrusive_ptr<c10::GeneratorImpl>::reclaim_copy(generator));
      } else if (operand.kind == Argument::device && kept.isDevice()) {
        value = c10::Device(c10::DeviceType::CPU);
      }
    }
  }

  void call() {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::DispatchKey::AutocastCPU);
    at::DisableRecordFunctionGuard unobserved;  // what the kernel calls is not the user's doing
    std::optional<LentGenerator> lent;
    if (facts_.seedless) lent.emplace(device_);
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  at::Tensor from_kernel(at::Tensor&& output) {
    if (!output.defined()) return std::move(output);
    TORCH_CHECK_NOT_IMPLEMENTED(
        output.layout() == c10::kStrided && output.unsafeGetTensorImpl()->has_storage(),
        facts_.name, " makes ", output.layout(), " tensors, which the simulated accelerator lacks");
    const auto* const storage = output.storage().unsafeGetStorageImpl();
    if (output.storage().use_count() > 1) {  // shared with an argument or with another output
      for (const auto& [other, tensor] : aliases_)
        if (other == storage) return view_of(*tensor, output);
      for (const auto& [other, tensor] : taken_)
        if (other == storage) return view_of(tensor, output);
    }
    auto result = adopt(at::Tensor(output), device_);
    made_.push_back(result);
    taken_.emplace_back(storage, result);
    outputs_.push_back(std::move(output));  // keeps `storage` from being used for another
    return result;
  }

  void replace_returns() {
    for (const auto& [tensor, alias] : outs_) adopt_resized(tensor, alias);
    const auto returns = facts_.aliased.size();
    const auto first = stack_.size() - returns;
    for (size_t at = 0; at < returns; ++at) {
      auto& value = stack_[first + at];
      if (facts_.aliased[at] >= 0) {
        value = kept_[static_cast<size_t>(facts_.aliased[at])];
      } else if (value.isTensor()) {
        value = from_kernel(std::move(value).toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        auto outputs = value.toTensorVector();
        value = c10::IValue();
        list.reserve(outputs.size());
        for (auto& output : outputs) list.push_back(from_kernel(std::move(output)));
        value = std::move(list);
      }
    }
  }

  const c10::OperatorHandle& op_;
  const OperatorFacts& facts_;
  torch::jit::Stack& stack_;
  size_t count_, first_ = 0;
  int device_ = -1;
  bool factory_ = false, masked_ = false;
  size_t nbytes_ = 0;
  std::vector<c10::IValue> kept_;
  std::vector<std::pair<const c10::StorageImpl*, const at::Tensor*>> aliases_;
  std::vector<std::pair<at::Tensor, at::Tensor>> outs_;
  std::vector<at::Tensor> made_, outputs_;
  std::vector<std::pair<const c10::StorageImpl*, at::Tensor>> taken_;
};

class Kernel final : public c10::OperatorKernel {
 public:
  explicit Kernel(const OperatorFacts* facts) : facts_(facts) {}
  void operator()(
      const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
    Lowering(op, *facts_, *stack).run();
  }

 private:
  const OperatorFacts* facts_;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lowering(op, facts_of(op), *stack).run();
}

}  // namespace

void lower(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  Lowering(op, facts_of(op), stack).run();
}

const OperatorFacts& facts_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* const known = new std::unordered_map<const c10::FunctionSchema*, OperatorFacts*>;
  std::lock_guard<std::mutex> guard(mutex);
  auto& facts = (*known)[&op.schema()];
  if (!facts) facts = new OperatorFacts(work_out(op));
  return *facts;
}

void register_lowering() {
  static auto* const all = new torch::Library(
      torch::Library::IMPL, "_", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  all->fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
  static auto* const aten = new torch::Library(
      torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (!starts_with(name.name, "aten::")) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    const auto& facts = facts_of(*op);
    // The two convolutions choose a backend by the device of their input.
    if (facts.view ||
        !(facts.has_cpu_kernel || starts_with(name.name, "aten::_foreach_") ||
          name.name == "aten::convolution" || name.name == "aten::convolution_backward"))
      continue;
    aten->impl(
        facts.name + 6, torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel>(&facts)));
  }
}

}  // namespace swap_adam
