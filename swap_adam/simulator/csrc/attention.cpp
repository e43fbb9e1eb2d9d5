// scaled_dot_product_attention: the CPU's own choice and its kernels, so that results are the CPU's.
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
constexpr int64_t kMath = 0, kFlash = 1, kOverrideable = 4;  // at::SDPBackend

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
  return choice == kFlash ? kOverrideable : kMath;
}

std::tuple<
    Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>
attention(
    const Tensor& query, const Tensor& key, const Tensor& value,
    const std::optional<Tensor>& bias, double dropout, bool causal, bool,
    std::optional<double> scale) {
  auto [output, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      query, key, value, dropout, causal, bias, scale);
  return {output, logsumexp, Tensor(), Tensor(), query.sym_size(2), key.sym_size(2),
          Tensor(), Tensor(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& bias, std::array<bool, 4>, const Tensor& output, const Tensor& logsumexp,
    const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const Tensor&, const Tensor&, std::optional<double> scale) {
  auto [query_gradient, key_gradient, value_gradient] =
      at::_scaled_dot_product_flash_attention_for_cpu_backward(
          gradient, query, key, value, output, logsumexp, dropout, causal,
          bias.defined() ? std::optional<Tensor>(bias) : std::nullopt, scale);
  return {query_gradient, key_gradient, value_gradient, Tensor()};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}

}  // namespace swap_adam

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &swap_adam::choose)
}
