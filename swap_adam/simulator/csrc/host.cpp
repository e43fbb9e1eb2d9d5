// The host's own use of pinned memory: torch operations on CPU tensors that lie in it. Aliases made
// through numpy are known by their address. What numpy itself, tolist() or a raw pointer do cannot
// be seen.
#include <ATen/record_function.h>

#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "lowering.h"
#include "tensors.h"

namespace swap_adam {

namespace {

thread_local int t_depth = 0;  // inside a host operation that has been counted

struct Counted final : public at::ObserverContext {};

const OperatorFacts* facts_of_call(const at::RecordFunction& call) {
  // The name lies in the operator's schema, so its address stands for the operator.
  thread_local std::unordered_map<const char*, const OperatorFacts*> known;
  const auto found = known.find(call.name());
  if (found != known.end()) return found->second;
  const auto name = call.operator_name();
  if (!name) return nullptr;
  const auto op = c10::Dispatcher::singleton().findSchema(*name);
  if (!op) return nullptr;
  const auto& facts = facts_of(*op);
  known[call.name()] = &facts;
  return &facts;
}

// Operators that read or write the bytes of their CPU operands themselves; composites are seen
// through what they call.
bool computes(const OperatorFacts& facts) {
  static const std::unordered_set<std::string_view> kMetadata{
      "aten::resize_", "aten::is_set_to", "aten::is_same_size", "aten::set_",
      "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset",
      "aten::set_.source_Tensor", "aten::_has_same_storage_numel", "aten::is_pinned"};
  const std::string_view name = facts.name;
  if (facts.view || kMetadata.count(name) != 0) return false;
  return facts.has_cpu_kernel || name == "aten::copy_";
}

std::unique_ptr<at::ObserverContext> before(const at::RecordFunction& call) {
  auto& machine = Machine::get();
  if (machine.pinned == 0 || t_depth > 0) return nullptr;
  const auto inputs = call.inputs();
  bool relevant = false, device = false;
  const auto look = [&](const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    if (on_device(tensor))
      device = true;
    else if (tensor.device().is_cpu() && tensor.unsafeGetTensorImpl()->has_storage() &&
             machine.maybe_pinned(tensor.storage().data()))
      relevant = true;
  };
  for (const auto& input : inputs) {
    if (input.isTensor()) {
      look(input.toTensor());
    } else if (input.isList()) {
      for (const auto& element : input.toListRef()) {
        if (!element.isTensor()) break;
        look(element.toTensor());
      }
    }
  }
  if (!relevant || device) return nullptr;  // transfers look after themselves
  const auto* const facts = facts_of_call(call);
  if (!facts || !computes(*facts)) return nullptr;
  Operation operation(kHost, facts->name);
  size_t nbytes = 0;
  bool touched = false;
  const auto use = [&](const at::Tensor& tensor, const OperatorFacts::Operand& operand) {
    if (!tensor.defined() || !tensor.device().is_cpu() ||
        !tensor.unsafeGetTensorImpl()->has_storage())
      return;
    const auto* const data = static_cast<const char*>(tensor.storage().data());
    auto* const block = machine.pinned_block(data);
    if (!block) return;
    touched = true;
    operation.use(
        block, tensor, static_cast<size_t>(data - static_cast<const char*>(block->data)),
        operand.write);
    nbytes += traffic(tensor) * (operand.write && !operand.write_only ? 2 : 1);
  };
  for (size_t at = 0; at < inputs.size() && at < facts->operands.size(); ++at) {
    const auto& input = inputs[at];
    if (input.isTensor()) {
      use(input.toTensor(), facts->operands[at]);
    } else if (input.isList()) {
      for (const auto& element : input.toListRef())
        if (element.isTensor()) use(element.toTensor(), facts->operands[at]);
    }
  }
  if (!touched) return nullptr;
  const auto bandwidth = machine.clock.costs.host_bandwidth;
  machine.clock.spend(static_cast<double>(nbytes) / bandwidth, facts->name, nbytes);
  ++t_depth;
  return std::make_unique<Counted>();
}

void after(const at::RecordFunction&, at::ObserverContext* context) {
  if (context) --t_depth;
}

}  // namespace

void watch_host() {
  at::addGlobalCallback(at::RecordFunctionCallback(&before, &after)
                            .needsInputs(true)
                            .scopes({at::RecordScope::FUNCTION}));
}

}  // namespace swap_adam
