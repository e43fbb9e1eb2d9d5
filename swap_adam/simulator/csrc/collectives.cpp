// Collectives over gloo: torch's CPU kernels of c10d on the bytes of the device's tensors, one
// operation of the current stream each. torch.distributed finds gloo as the device's backend.
#if __has_include(<torch/csrc/distributed/c10d/ProcessGroup.hpp>)
#ifndef USE_DISTRIBUTED
#define USE_DISTRIBUTED
#endif
#ifndef USE_C10D_GLOO
#define USE_C10D_GLOO
#endif
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/div.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/library.h>

#include <string_view>
#include <unordered_map>

#include "tensors.h"

namespace swap_adam {

namespace {

template <typename OnTensor>
void each_tensor(const c10::IValue& value, OnTensor&& on_tensor) {
  if (value.isTensor()) {
    if (on_device(value.toTensor())) on_tensor(value.toTensor());
  } else if (value.isList()) {
    for (const auto& element : value.toListRef()) each_tensor(element, on_tensor);
  }
}

// The same nesting of lists with every tensor replaced.
template <typename Replace>
c10::IValue replaced(const c10::IValue& value, Replace&& replace) {
  if (value.isTensor()) return replace(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(replace(tensor));
    return list;
  }
  if (!value.isList()) return value;
  c10::List<c10::List<at::Tensor>> lists;
  for (const auto& element : value.toListRef()) {
    if (!element.isTensorList()) return value;  // a list of something else
    lists.push_back(replaced(element, replace).toTensorList());
  }
  return lists;
}

bool reads_only(const std::string& operation, const std::string& argument) {
  return operation == "c10d::send" || argument.find("input") != std::string::npos;
}

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto first = stack->size() - arguments.size();
  int device = -1;
  for (size_t at = first; at < stack->size(); ++at)
    each_tensor((*stack)[at], [&](const at::Tensor& tensor) { device = tensor.device().index(); });
  auto& machine = Machine::get();
  std::optional<Operation> operation;
  size_t nbytes = 0;
  if (device >= 0) operation.emplace(device, schema.name().c_str());
  std::vector<at::Tensor> kept, written;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals;
  for (size_t at = 0; at < arguments.size(); ++at) {
    const bool write = !reads_only(schema.name(), arguments[at].name());
    each_tensor((*stack)[first + at], [&](const at::Tensor& tensor) {
      operation->use(tensor, write);
      nbytes += traffic(tensor);
      kept.push_back(tensor);
      if (write) written.push_back(tensor);
      // As NCCL's process group: the memory belongs to the collective until it is over.
      if (auto* const block = block_of(tensor))
        machine.record_stream(block, operation->as_use().timeline);
    });
  }
  if (operation) operation->run();
  int64_t mean_over = 0;  // gloo has no mean
  for (size_t at = first; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isCustomClass() && arguments[at - first].name() == "reduce_op") {
      if (value.toCustomClass<c10d::ReduceOp>()->op_ == c10d::ReduceOp::AVG) {
        mean_over = (*stack)[at - 1].toCustomClass<c10d::ProcessGroup>()->getSize();
        value = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM);
      }
      continue;
    }
    value = replaced(value, [&](const at::Tensor& tensor) {
      if (!on_device(tensor)) return tensor;
      auto alias = cpu_alias(tensor);
      originals.emplace(alias.unsafeGetTensorImpl(), tensor);
      kept.push_back(alias);
      return alias;
    });
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  const auto results = stack->size() - schema.returns().size();
  for (size_t at = results; at < stack->size(); ++at) {
    auto& value = (*stack)[at];
    if (value.isCustomClass()) {
      value.toCustomClass<c10d::Work>()->wait();  // the host's time stands still meanwhile
    } else {
      value = replaced(value, [&](const at::Tensor& tensor) {
        const auto found = originals.find(tensor.unsafeGetTensorImpl());
        return found == originals.end() ? tensor : found->second;
      });
    }
  }
  if (mean_over > 0) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& tensor : written) cpu_alias(tensor).div_(mean_over);
  }
  if (operation) operation->issue(Kind::kernel, nbytes);
}

class Silent final : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

}  // namespace

void register_collectives() {
  // torch registers kernels of its own for this key, which look for a process group that knows the
  // device; replacing them is meant, and not worth a warning.
  static Silent silent;
  const c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static auto* const library = new torch::Library(
      torch::Library::IMPL, "c10d", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (std::string_view(name.name).substr(0, 6) != "c10d::") continue;
    const auto op = dispatcher.findSchema(name);
    if (op && op->hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
        op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1))
      library->impl(
          name.name.c_str() + 6, torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
}

}  // namespace swap_adam

#else

namespace swap_adam {
void register_collectives() {}
}  // namespace swap_adam
#endif
