// scaled_dot_product_attention: the CPU's own choice and its kernels, so that results are the CPU's.
// What the CPU calls its flash kernel is reached by the name of the memory-efficient one, which
// passes masks and any head size on as they are, and which DTensor and context_parallel know.
#include <ATen/core/Tensor.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_fused_sdp_choice.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/library.h>

#include <tuple>

#include "tensors.h"

namespace swap_adam {

namespace {

using at::Tensor;
constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;  // at::SDPBackend

int64_t choose(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& mask, double dropout, bool causal, std::optional<double> scale,
    bool grouped) {
  // The CPU declines its own kernel when a gradient towards the mask is asked for.
  if (mask && mask->defined() && (mask->requires_grad() || !on_device(*mask))) return kMath;
  std::optional<Tensor> alias;
  if (mask && mask->defined()) alias = cpu_alias(*mask);
  const auto choice = at::_fused_sdp_choice(
      cpu_alias(query), cpu_alias(key), cpu_alias(value), alias, dropout, causal, scale, grouped);
  return choice == kFlash ? kEfficient : kMath;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& bias, bool, double dropout, bool causal,
    std::optional<double> scale) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, causal, bias, scale);
  // The seed and the offset of a dropout, which the CPU's kernel has not: on the CPU, as CUDA's.
  const auto none = at::empty({}, at::TensorOptions(at::kLong).device(at::kCPU));
  return {output, logsumexp, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, const Tensor& output, const Tensor& logsumexp, const Tensor&,
    const Tensor&, double dropout, std::array<bool, 4>, bool causal,
    std::optional<double> scale) {
  if (!gradient.defined()) return {};
  auto [query_gradient, key_gradient, value_gradient] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, query, key, value, output, logsumexp, dropout, causal,
          bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, scale);
  return {query_gradient, key_gradient, value_gradient, Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_efficient_attention", &attention);
  m.impl("_scaled_dot_product_efficient_attention_backward", &attention_backward);
}

}  // namespace swap_adam

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &swap_adam::choose)
}
