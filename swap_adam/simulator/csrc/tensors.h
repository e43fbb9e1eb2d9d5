// Between torch's tensors and the machine's blocks.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include "machine.h"

namespace swap_adam {

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void delete_block(void* block);
double elapsed_ms(const Event& first, const Event& second);

inline Block* block_of(const at::Tensor& tensor) {
  const auto& pointer = tensor.storage().data_ptr();
  return pointer.get_deleter() == &delete_block ? static_cast<Block*>(pointer.get_context())
                                                : nullptr;
}

// A CPU tensor over the same bytes: same sizes, strides, offset, conjugate and negative bits.
at::Tensor cpu_alias(const at::Tensor& tensor);
// The same with a storage of its own that an out= kernel may resize; `adopt_resized` then gives the
// device tensor what the kernel made of it.
at::Tensor resizable_alias(const at::Tensor& tensor);
void adopt_resized(const at::Tensor& tensor, const at::Tensor& alias);
// A device tensor that takes over the storage of a CPU kernel's output.
at::Tensor adopt(at::Tensor&& output, int device);
// A device tensor over `base`'s storage with `alias`'s geometry.
at::Tensor view_of(const at::Tensor& base, const at::Tensor& alias);

std::string text_of(const at::Tensor& tensor);  // float32 [3, 4]

// Fails, naming the operation and the tensor, when the storage was released.
void check_alive(const at::Tensor& tensor, const char* name);

// Changes what a storage owns, as torch does for CUDA: the bytes that stay are copied.
void resize_storage(c10::StorageImpl& storage, size_t nbytes);

// The byte ranges of a tensor in its storage: exact unless there are very many of them.
template <typename OnRange>
void each_range(const at::Tensor& tensor, OnRange&& on_range) {
  if (tensor.numel() == 0) return;
  const auto item = static_cast<int64_t>(tensor.itemsize());
  const auto start = tensor.storage_offset() * item;
  if (tensor.is_non_overlapping_and_dense()) {
    on_range(static_cast<size_t>(start), static_cast<size_t>(start + tensor.numel() * item));
    return;
  }
  // Fold dimensions that continue each other, from the smallest stride up.
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t dim = 0; dim < tensor.dim(); ++dim)
    if (tensor.size(dim) > 1 && tensor.stride(dim) > 0)
      dims.emplace_back(tensor.stride(dim), tensor.size(dim));
  std::sort(dims.begin(), dims.end());
  int64_t run = 1, count = 1;
  std::vector<std::pair<int64_t, int64_t>> outer;
  for (const auto& [stride, size] : dims) {
    if (outer.empty() && stride <= run) {
      run = stride * (size - 1) + run;
    } else {
      outer.emplace_back(stride, size);
      count *= size;
    }
  }
  if (count > 256) {
    int64_t last = run;
    for (const auto& [stride, size] : outer) last += stride * (size - 1);
    on_range(static_cast<size_t>(start), static_cast<size_t>(start + last * item));
    return;
  }
  for (int64_t index = 0; index < count; ++index) {
    int64_t rest = index, offset = 0;
    for (const auto& [stride, size] : outer) {
      offset += rest % size * stride;
      rest /= size;
    }
    const auto first = start + offset * item;
    on_range(static_cast<size_t>(first), static_cast<size_t>(first + run * item));
  }
}

// Bytes of memory that reading the tensor once moves: an expanded dimension moves nothing more.
inline size_t traffic(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  auto nbytes = static_cast<size_t>(tensor.itemsize());
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  for (size_t dim = 0; dim < sizes.size(); ++dim)
    if (strides[dim] != 0) nbytes *= static_cast<size_t>(sizes[dim]);
  return nbytes;
}

// One operation of a stream, from the check of its operands to its place on the clock:
//   Operation operation(device, name);   // takes the lock
//   operation.use(tensor, write); ...
//   operation.run();                     // raises what was found, gives the lock back
//   ... the kernel ...
//   operation.issue(Kind::kernel, nbytes);
class Operation {
 public:
  Operation(int device, const char* name);
  Operation(uint32_t timeline, const char* name);
  void use(const at::Tensor& tensor, bool write) {
    check_alive(tensor, use_.name);
    if (auto* const block = block_of(tensor)) use(block, tensor, 0, write);
  }
  void use(Block* block, size_t begin, size_t end, bool write) {
    machine_.use(block, begin, end, write, use_, conflicts_);
    if (!conflicts_.empty()) report(block, begin, end, write, "");
  }
  // A tensor in `block` whose storage begins `offset` bytes into it.
  void use(Block* block, const at::Tensor& tensor, size_t offset, bool write) {
    each_range(tensor, [&](size_t begin, size_t end) {
      machine_.use(block, offset + begin, offset + end, write, use_, conflicts_);
      if (!conflicts_.empty())
        report(block, offset + begin, offset + end, write, text_of(tensor));
    });
  }
  void produced(const at::Tensor& tensor) {  // a tensor that the kernel has made
    auto* const block = block_of(tensor);
    if (!block || machine_.races == Races::off) return;
    auto guard = machine_.lock();
    std::vector<Conflict> none;
    machine_.use(block, 0, block->nbytes, true, use_, none);
  }
  void run() {
    machine_.raise_found();
    lock_.unlock();
  }
  void issue(Kind kind, size_t nbytes) {
    auto guard = machine_.lock();
    machine_.launch(use_.timeline, kind, use_.name, use_.sequence, nbytes);
  }
  void host_waits(bool is_blocking = true) {
    if (is_blocking) machine_.synchronizes(use_.name);
    machine_.host_wait_stream(use_.timeline);
  }
  const Use& as_use() const { return use_; }

 private:
  void report(Block* block, size_t begin, size_t end, bool write, const std::string& tensor);

  Machine& machine_;
  std::unique_lock<std::recursive_mutex> lock_;
  Use use_;
  std::vector<Conflict> conflicts_;
};

}  // namespace swap_adam
