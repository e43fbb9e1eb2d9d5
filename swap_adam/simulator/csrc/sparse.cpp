// Sparse COO tensors: enough to make them, look at them, copy and coalesce them, so that a model
// with sparse gradients meets the optimizer's own answer to those.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_coalesced_native.h>
#include <ATen/ops/_indices_native.h>
#include <ATen/ops/_nnz_native.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_and_tensors_native.h>
#include <ATen/ops/_sparse_coo_tensor_with_dims_native.h>
#include <ATen/ops/_values_native.h>
#include <ATen/ops/clone_native.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/copy_sparse_to_sparse_native.h>
#include <ATen/ops/dense_dim_native.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/indices_native.h>
#include <ATen/ops/is_coalesced_native.h>
#include <ATen/ops/sparse_dim_native.h>
#include <ATen/ops/values_native.h>
#include <ATen/ops/zero_native.h>
#include <ATen/record_function.h>
#include <torch/library.h>

#include "tensors.h"

namespace swap_adam {

namespace {

at::Tensor coalesce(const at::Tensor& self) {
  const auto device = self.device().index();
  const auto indices = self._indices(), values = self._values();
  Operation operation(device, "aten::_coalesce");
  operation.use(indices, false);
  operation.use(values, false);
  operation.run();
  at::Tensor made;
  {
    at::AutoDispatchBelowADInplaceOrView below;
    at::DisableRecordFunctionGuard unobserved;
    made = at::_sparse_coo_tensor_unsafe(
               cpu_alias(indices), cpu_alias(values), self.sizes(), std::nullopt, std::nullopt,
               std::nullopt, std::nullopt, false)
               .coalesce();
  }
  auto new_indices = adopt(made._indices().clone(), device);
  auto new_values = adopt(made._values().clone(), device);
  operation.produced(new_indices);
  operation.produced(new_values);
  operation.issue(
      Kind::kernel,
      traffic(indices) + traffic(values) + traffic(new_indices) + traffic(new_values));
  operation.host_waits();  // how many entries are left depends on the data
  auto result = at::_sparse_coo_tensor_unsafe(
      new_indices, new_values, self.sizes(), std::nullopt, std::nullopt, std::nullopt,
      std::nullopt, true);
  return result;
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, SparsePrivateUse1, m) {
  m.impl("_sparse_coo_tensor_with_dims", &at::native::new_with_dims_sparse);
  m.impl(
      "_sparse_coo_tensor_with_dims_and_tensors",
      &at::native::new_with_dims_and_tensor_sparse_symint);
  m.impl("empty.memory_format", &at::native::empty_sparse_symint);
  m.impl("sparse_dim", &at::native::sparse_dim_sparse);
  m.impl("dense_dim", &at::native::dense_dim_sparse);
  m.impl("_nnz", &at::native::_nnz_sparse);
  m.impl("is_coalesced", &at::native::is_coalesced_sparse);
  m.impl("_coalesced_", &at::native::_coalesced_sparse_);
  m.impl("_indices", &at::native::_indices_sparse);
  m.impl("_values", &at::native::_values_sparse);
  m.impl("indices", &at::native::indices_sparse);
  m.impl("values", &at::native::values_sparse);
  m.impl("clone", &at::native::clone_sparse);
  m.impl("zero_", &at::native::zero_sparse_);
  m.impl("copy_", &at::native::copy_sparse_wrapper_);
  m.impl("copy_sparse_to_sparse_", &at::native::copy_sparse_);
  m.impl("_coalesce", &coalesce);
}

}  // namespace swap_adam
