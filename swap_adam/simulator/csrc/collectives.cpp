// Collectives over gloo: torch's CPU kernels of c10d on the bytes of the device's tensors.
// torch.distributed finds gloo as the device's backend.
//
// A call is one operation of a stream, as with NCCL: of the current one where the caller waits at
// once (async_op=False), else of a stream of the group's own, which begins after the current one
// and which wait() lets the current one wait for. A collective has written its outputs when the
// call returns: wait() only orders, and may be called late, twice or never. What a message brings
// is there once the peer has sent it: it lands like a copy in flight, when the first operation that
// is ordered after it asks for the bytes.
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

#include <map>
#include <mutex>
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
  if (!value.isList() || *value.toList().elementType() != *c10::ListType::ofTensors())
    return value;
  c10::List<c10::List<at::Tensor>> lists;
  for (const auto& element : value.toListRef())
    lists.push_back(replaced(element, replace).toTensorList());
  return lists;
}

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// A message to or from a peer. gloo must be asked to wait for it once and no more.
class Message {
 public:
  Message(WorkPtr work, at::Tensor bytes) : work_(std::move(work)), bytes_(std::move(bytes)) {}
  ~Message() {
    // gloo goes on with what nobody waits for, and cannot be asked whether it is done.
    static auto* const pending = new std::vector<std::pair<WorkPtr, at::Tensor>>;
    static std::mutex mutex;
    if (asked_) return;
    std::lock_guard<std::mutex> guard(mutex);
    pending->emplace_back(std::move(work_), std::move(bytes_));
  }
  void wait(std::chrono::milliseconds timeout) {
    std::lock_guard<std::mutex> guard(mutex_);
    if (!asked_) {
      asked_ = true;
      try {
        work_->wait(timeout);
        arrived_ = true;
      } catch (...) {
        error_ = std::current_exception();
      }
    }
    if (error_) std::rethrow_exception(error_);
  }
  bool arrived() {
    std::lock_guard<std::mutex> guard(mutex_);
    return arrived_;
  }
  int source() const { return work_->sourceRank(); }
  const at::Tensor& bytes() const { return bytes_; }

 private:
  std::mutex mutex_;
  WorkPtr work_;
  at::Tensor bytes_;
  bool asked_ = false, arrived_ = false;
  std::exception_ptr error_;
};

// What the caller gets: orders the current stream after the operation, as often as it is asked to.
class StreamWork final : public c10d::Work {
 public:
  StreamWork(
      int rank, int device, uint32_t timeline, std::vector<at::Tensor> outputs,
      std::shared_ptr<Message> message)
      : c10d::Work(rank, c10d::OpType::UNKNOWN),
        device_(device), timeline_(timeline), outputs_(std::move(outputs)),
        message_(std::move(message)) {
    Machine::get().record(done_, timeline_);
  }
  bool isCompleted() override {
    return (!message_ || message_->arrived()) && Machine::get().query(done_);
  }
  bool isSuccess() const override { return !message_ || message_->arrived(); }
  int sourceRank() const override {
    TORCH_CHECK(message_, "only a message has a source, not a collective");
    message_->wait(kNoTimeout);
    return message_->source();
  }
  void synchronize() override {
    auto& machine = Machine::get();
    const auto current = machine.current(device_);
    if (current != timeline_) machine.stream_wait(current, done_);
  }
  bool wait(std::chrono::milliseconds timeout) override {
    if (message_) message_->wait(timeout);
    synchronize();
    return true;
  }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    TORCH_CHECK(!message_, "gloo has no future for send and recv");
    if (future_) return future_;
    const c10::Device device(
        c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(device_));
    future_ = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{device});
    const auto before = exchange_current(device_, timeline_);  // whose events it records
    future_->markCompleted(c10::IValue(outputs_));
    exchange_current(device_, before);
    return future_;
  }

 private:
  int device_;
  uint32_t timeline_;
  std::vector<at::Tensor> outputs_;
  std::shared_ptr<Message> message_;
  Event done_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// The stream of a group's asynchronous collectives (peer -1), or of its messages with one peer.
uint32_t stream_of(const c10d::ProcessGroup* group, int device, int64_t peer) {
  using Key = std::tuple<const c10d::ProcessGroup*, int, int64_t>;
  static auto* const streams = new std::map<Key, uint32_t>;
  auto& machine = Machine::get();
  auto guard = machine.lock();
  auto& timeline = (*streams)[{group, device, peer}];
  if (timeline == 0) timeline = machine.timeline(machine.new_stream(device));
  return timeline;
}

// One call of c10d, as its schema describes it.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : op_(op), stack_(*stack), arguments_(op.schema().arguments()),
        name_(op.schema().name()), first_(stack->size() - arguments_.size()) {
    for (size_t at = first_; at < stack_.size(); ++at)
      each_tensor(
          stack_[at], [&](const at::Tensor& tensor) { device_ = tensor.device().index(); });
    if (const auto* const group = find("process_group"))
      group_ = group->toCustomClass<c10d::ProcessGroup>();
  }

  void run() {
    if (device_ < 0 || !group_) {  // none of the device's business
      redispatch();
      return;
    }
    const bool receives = name_.substr(0, 11) == "c10d::recv_", sends = name_ == "c10d::send";
    const auto* const root = find("root_rank");
    // Who has no part in the result: of a reduction all but the root, of a broadcast the root.
    const bool is_root = root && root->toInt() == group_->getRank();
    const bool keeps = (name_ == "c10d::reduce_" && !is_root) ||
        (name_ == "c10d::broadcast_" && is_root) || sends;
    const auto timeline = choose_stream(receives || sends);
    Operation operation(timeline, op_.schema().name().c_str());
    size_t nbytes = 0;
    std::vector<at::Tensor> kept, written, outputs;
    for (size_t at = 0; at < arguments_.size(); ++at) {
      const bool input = arguments_[at].name().find("input") != std::string::npos;
      each_tensor(stack_[first_ + at], [&](const at::Tensor& tensor) {
        operation.use(tensor, !input && !keeps);
        nbytes += traffic(tensor);
        kept.push_back(tensor);
        if (!input) outputs.push_back(tensor);
        if (!input && !keeps) written.push_back(tensor);
        // As NCCL's process group: the memory belongs to the call until it is over.
        if (auto* const block = block_of(tensor))
          Machine::get().record_stream(block, timeline);
      });
    }
    operation.run();
    const bool mean = take_mean();
    at::Tensor bytes;  // of a message: gloo's own, since it works on when the call has returned
    for (size_t at = first_; at < stack_.size(); ++at) {
      stack_[at] = replaced(stack_[at], [&](const at::Tensor& tensor) {
        if (!on_device(tensor)) return tensor;
        auto alias = cpu_alias(tensor);
        if (receives || sends || keeps) {
          TORCH_CHECK_VALUE(alias.is_contiguous(), name_, ": Tensors must be contiguous");
          at::AutoDispatchBelowADInplaceOrView below;
          alias = bytes = alias.clone();
        }
        kept.push_back(alias);
        originals_.emplace(alias.unsafeGetTensorImpl(), tensor);
        return alias;
      });
    }
    redispatch();
    WorkPtr work;
    const auto results = stack_.size() - op_.schema().returns().size();
    for (size_t at = results; at < stack_.size(); ++at) {
      auto& value = stack_[at];
      if (value.isCustomClass()) {
        work = value.toCustomClass<c10d::Work>();
      } else {
        value = replaced(value, [&](const at::Tensor& tensor) {
          const auto found = originals_.find(tensor.unsafeGetTensorImpl());
          return found == originals_.end() ? tensor : found->second;
        });
      }
    }
    std::shared_ptr<Message> message;
    if (receives || sends) {
      message = std::make_shared<Message>(work, bytes);
      if (receives) deliver(operation, written.front(), message);
    } else if (work) {
      work->wait();  // the host's time stands still meanwhile
    }
    if (mean) {
      at::AutoDispatchBelowADInplaceOrView below;
      for (const auto& tensor : written) {
        const auto alias = cpu_alias(tensor);
        if (at::isIntegralType(alias.scalar_type(), true))
          alias.div_(group_->getSize(), "trunc");
        else
          alias.div_(group_->getSize());
      }
    }
    operation.issue(Kind::kernel, nbytes);
    for (size_t at = results; at < stack_.size(); ++at)
      if (stack_[at].isCustomClass())
        stack_[at] = WorkPtr(c10::make_intrusive<StreamWork>(
            group_->getRank(), device_, timeline, std::move(outputs), message));
  }

 private:
  const c10::IValue* find(std::string_view name) const {
    for (size_t at = 0; at < arguments_.size(); ++at)
      if (arguments_[at].name() == name) return &stack_[first_ + at];
    return nullptr;
  }

  uint32_t choose_stream(bool message) const {
    auto& machine = Machine::get();
    const auto current = machine.current(device_);
    int64_t peer = -1;
    if (message) {
      const auto* const with = find(name_ == "c10d::send" ? "dst" : "src");
      peer = with ? with->toInt() : group_->getSize();  // from any source
    } else {
      // torch 2.7 has neither name.
      const auto* const async = find("async_op") ? find("async_op") : find("asyncOp");
      if (async && !async->toBool()) return current;
    }
    const auto own = stream_of(group_.get(), device_, peer);
    Event begin;
    machine.record(begin, current);
    machine.stream_wait(own, begin);
    return own;
  }

  // gloo has no mean in every torch: the sum is asked for, and divided.
  bool take_mean() {
    for (size_t at = 0; at < arguments_.size(); ++at) {
      auto& value = stack_[first_ + at];
      if (arguments_[at].name() != "reduce_op" ||
          value.toCustomClass<c10d::ReduceOp>()->op_ != c10d::ReduceOp::AVG)
        continue;
      value = c10::make_intrusive<c10d::ReduceOp>(c10d::ReduceOp::SUM);
      return true;
    }
    return false;
  }

  void deliver(
      const Operation& operation, const at::Tensor& tensor, std::shared_ptr<Message> message) {
    auto* const block = block_of(tensor);
    if (!block || tensor.numel() == 0) return;
    Copy copy{
        nullptr, block, static_cast<const char*>(message->bytes().const_data_ptr()),
        static_cast<char*>(cpu_alias(tensor).mutable_data_ptr()), tensor.nbytes(),
        operation.as_use()};
    copy.arrive = [message] { message->wait(kNoTimeout); };
    auto guard = Machine::get().lock();
    Machine::get().add_copy(copy);
  }

  void redispatch() {
    at::AutoDispatchBelowADInplaceOrView below;
    op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack& stack_;
  const std::vector<c10::Argument>& arguments_;
  const std::string_view name_;
  const size_t first_;
  int device_ = -1;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::unordered_map<const c10::TensorImpl*, at::Tensor> originals_;
};

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  Call(op, stack).run();
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
