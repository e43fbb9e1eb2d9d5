// Operations of the device computed by the CPU's kernels over the same bytes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <vector>

namespace swap_adam {

// What the schema of an operator says about it, worked out once.
struct OperatorFacts {
  enum class Argument : uint8_t { other, tensor, tensors, generator, device };
  struct Operand {
    Argument kind = Argument::other;
    bool write = false;       // its bytes may change
    bool write_only = false;  // ... and are not read
    bool out = false;         // an out= argument, which may be resized
    bool gradient = false;    // of a fused optimizer: written only together with grad_scale
    bool indices = false;     // of an indexing operator
    bool anywhere = false;    // may be a CPU tensor
  };
  const char* name = nullptr;  // aten::add_.Tensor
  std::vector<Operand> operands;
  std::vector<int> aliased;  // per return: the argument that it is, or -1
  int grad_scale = -1;
  bool view = false;         // touches no bytes
  bool synchronizes = false; // its result depends on the data
  bool seedless = false;     // random without a generator argument
  bool has_cpu_kernel = false;
};

// Cached for the life of the process.
const OperatorFacts& facts_of(const c10::OperatorHandle& op);

// Runs the operator on the arguments on the stack.
void lower(const c10::OperatorHandle& op, torch::jit::Stack& stack);

// Registers the lowering: as the fallback of the device, and explicitly for what has a kernel that
// would beat a fallback and round differently. Call it after every other kernel is registered.
void register_lowering();

}  // namespace swap_adam
