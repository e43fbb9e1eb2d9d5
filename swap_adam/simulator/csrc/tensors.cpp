#include "tensors.h"

#include <c10/core/CPUAllocator.h>

#include <sstream>

namespace swap_adam {

namespace {

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU);
constexpr c10::DispatchKeySet kDevice(c10::DispatchKey::PrivateUse1);

at::Tensor with_storage(
    c10::Storage storage, c10::DispatchKeySet keys, const at::Tensor& geometry) {
  auto result = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), keys, geometry.dtype());
  auto* const impl = result.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(geometry.sizes(), geometry.strides(), geometry.storage_offset());
  if (geometry.is_conj()) impl->_set_conj(true);
  if (geometry.is_neg()) impl->_set_neg(true);
  if (geometry.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return result;
}

c10::Storage storage_of(c10::DataPtr pointer, size_t nbytes, c10::Allocator* allocator) {
  return c10::Storage(
      c10::Storage::use_byte_size_t(), nbytes, std::move(pointer), allocator, true);
}

// Takes a CPU kernel's allocation over into a block, without a copy where nobody else has it.
c10::DataPtr take_over(c10::StorageImpl& storage, int device) {
  const c10::Device where(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device));
  const auto nbytes = storage.nbytes();
  if (nbytes == 0) return c10::DataPtr(nullptr, where);
  const auto* const from = storage.data_ptr().get();
  if (storage.data_ptr().get_context() == from) {
    auto owned = storage.set_data_ptr(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
    auto* const block = Machine::get().allocate(device, nbytes, owned.move_context());
    return c10::DataPtr(block->data, block, &delete_block, where);
  }
  auto* const block = Machine::get().allocate(device, nbytes);
  std::memcpy(block->data, from, nbytes);
  return c10::DataPtr(block->data, block, &delete_block, where);
}

}  // namespace

at::Tensor cpu_alias(const at::Tensor& tensor) {
  if (const auto* const block = block_of(tensor)) return with_storage(block->alias, kCpu, tensor);
  static const c10::Storage empty(
      c10::Storage::use_byte_size_t(), 0,
      c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), nullptr, false);
  return with_storage(empty, kCpu, tensor);
}

at::Tensor resizable_alias(const at::Tensor& tensor) {
  auto* const block = block_of(tensor);
  return with_storage(
      storage_of(
          c10::DataPtr(block ? block->data : nullptr, c10::Device(c10::DeviceType::CPU)),
          block ? block->nbytes : 0, c10::GetCPUAllocator()),
      kCpu, tensor);
}

void adopt_resized(const at::Tensor& tensor, const at::Tensor& alias) {
  auto& storage = *alias.storage().unsafeGetStorageImpl();
  auto* const block = block_of(tensor);
  if (storage.data_ptr().get() != (block ? block->data : nullptr)) {
    auto& own = *tensor.storage().unsafeGetStorageImpl();
    const auto nbytes = storage.nbytes();
    own.set_data_ptr_noswap(take_over(storage, tensor.device().index()));
    own.set_nbytes(nbytes);
  }
  if (tensor.sizes() != alias.sizes() || tensor.strides() != alias.strides())
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(
        alias.sizes(), alias.strides(), alias.storage_offset());
}

at::Tensor adopt(at::Tensor&& output, int device) {
  auto& storage = *output.storage().unsafeGetStorageImpl();
  const auto nbytes = storage.nbytes();
  return with_storage(
      storage_of(take_over(storage, device), nbytes, device_allocator()), kDevice, output);
}

at::Tensor view_of(const at::Tensor& base, const at::Tensor& alias) {
  return with_storage(base.storage(), kDevice, alias);
}

std::string text_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << c10::getDtypeNames(tensor.scalar_type()).first << " " << tensor.sizes();
  return text.str();
}

void check_alive(const at::Tensor& tensor, const char* name) {
  if (tensor.numel() == 0) return;
  const auto nbytes = tensor.storage().nbytes();
  if (nbytes != 0 && tensor.storage().data_ptr().get() != nullptr) return;
  TORCH_CHECK(
      false, "simulated accelerator: ", name, " uses a tensor whose storage was released: ",
      text_of(tensor), " on ", tensor.device(), "; its storage has ", nbytes, " bytes");
}

Operation::Operation(int device, const char* name)
    : Operation(Machine::get().current(device), name) {}

Operation::Operation(uint32_t timeline, const char* name)
    : machine_(Machine::get()), lock_(machine_.lock()) {
  use_ = {timeline, timeline == kHost ? 0 : machine_.timelines.next(timeline), name};
}

void Operation::report(
    Block* block, size_t begin, size_t end, bool write, const std::string& tensor) {
  machine_.found(machine_.conflict(
      conflicts_.front(), *block, use_, write, begin, end, tensor));
  conflicts_.clear();
}

}  // namespace swap_adam
