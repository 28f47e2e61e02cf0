// An accelerator that exists in software: two devices on torch's PrivateUse1.
//
// Memory     mmap, protected except while a kernel of the device works on it: a host that touches it dies at once.
// Kernels    one boxed kernel for every operator: opens the pages of its arguments, computes, closes them. Arguments that lie on the
//            host or on the other device are refused, so nothing crosses by accident.
// Streams    a thread each, in order. Operators that write in place, copies and replays run there; one that has to tell its result's
//            shape waits for its stream and then runs. Events mark places in a stream.
// Graphs     a capture records operators with their arguments; a replay runs them again into the same memory. Whatever needs the host
//            (a scalar read, a copy to it, a result whose shape depends on data) is refused inside a capture. A graph owns what was made
//            inside its capture; the rest it knows by address alone, and a replay faults when any of that was freed or moved since.

#include <sys/mman.h>

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using Stack = torch::jit::Stack;
constexpr auto kFake = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex kDevices = 2;
constexpr int64_t kCapacity = int64_t(1) << 30;
constexpr size_t kPage = 4096;

// ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Block {
  size_t bytes;
  DeviceIndex device;
  bool counted;  // what is made inside a capture lies in a pool beside the device's memory
  int open = 0;
};

struct Memory {
  std::mutex lock;
  std::map<char*, Block> blocks;
  int64_t used[kDevices] = {};
};

Memory& memory() {
  static auto* it = new Memory;
  return *it;
}

void free_block(void* pointer) {
  auto& m = memory();
  std::lock_guard<std::mutex> hold(m.lock);
  auto found = m.blocks.find(static_cast<char*>(pointer));
  m.used[found->second.device] -= static_cast<int64_t>(found->second.counted ? found->second.bytes : 0);
  munmap(pointer, found->second.bytes);
  m.blocks.erase(found);
}

thread_local DeviceIndex current_device = 0;

// Memory that a graph touches and does not own.
struct Loan {
  c10::weak_intrusive_ptr<c10::StorageImpl> owner;
  c10::Storage borrowed;  // the same bytes, kept alive by nobody
  std::string op;         // that touched it first
};

struct Capture {
  std::vector<std::function<void()>> steps;
  std::unordered_map<c10::StorageImpl*, Loan> loans;
  int64_t bytes = 0;
  DeviceIndex device = 0;
};
thread_local Capture* capture = nullptr;

c10::DataPtr allocate_on(size_t asked, DeviceIndex device) {
  if (asked == 0) return {nullptr, Device(kFake, device)};
  auto& m = memory();
  size_t bytes = (asked + kPage - 1) / kPage * kPage;
  std::lock_guard<std::mutex> hold(m.lock);
  TORCH_CHECK_WITH(OutOfMemoryError, bytes <= static_cast<size_t>(kCapacity - m.used[device]), "fake:", int(device), " has ",
                   kCapacity - m.used[device], " bytes free, ", asked, " were asked for");
  void* pointer = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(pointer != MAP_FAILED, "the system maps no further memory for fake:", int(device));
  m.blocks[static_cast<char*>(pointer)] = {bytes, device, capture == nullptr};
  m.used[device] += static_cast<int64_t>(capture == nullptr ? bytes : 0);
  if (capture != nullptr) capture->bytes += static_cast<int64_t>(bytes);
  return {pointer, pointer, &free_block, Device(kFake, device)};
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current_device); }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "memory of fake is copied by its kernels alone"); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kFake, &allocator);

// Pages that a kernel may touch while this lives.
class Opened {
 public:
  ~Opened() {
    std::lock_guard<std::mutex> hold(memory().lock);
    for (char* base : bases_) {
      auto& block = memory().blocks.at(base);
      if (--block.open == 0) mprotect(base, block.bytes, PROT_NONE);
    }
  }
  void add(const void* pointer) {
    if (pointer == nullptr) return;
    auto* base = static_cast<char*>(const_cast<void*>(pointer));
    if (!bases_.insert(base).second) return;
    std::lock_guard<std::mutex> hold(memory().lock);
    auto& block = memory().blocks.at(base);
    if (block.open++ == 0) mprotect(base, block.bytes, PROT_READ | PROT_WRITE);
  }

 private:
  std::set<char*> bases_;
};

// Host memory that a stream may copy from and to while the host goes on.
struct Pinned final : c10::Allocator {
  std::mutex lock;
  std::map<char*, size_t> ranges;
  c10::DataPtr allocate(size_t bytes) override {
    void* pointer = bytes ? aligned_alloc(64, (bytes + 63) / 64 * 64) : nullptr;
    std::lock_guard<std::mutex> hold(lock);
    if (pointer) ranges[static_cast<char*>(pointer)] = bytes;
    return {pointer, pointer, &release, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
  bool holds(const void* pointer) {
    std::lock_guard<std::mutex> hold(lock);
    auto* place = static_cast<char*>(const_cast<void*>(pointer));
    auto after = ranges.upper_bound(place);
    if (after == ranges.begin()) return false;
    --after;
    return place < after->first + after->second;
  }
  static void release(void* pointer);
};

Pinned& pinned() {
  static auto* it = new Pinned;
  return *it;
}

void Pinned::release(void* pointer) {
  if (pointer == nullptr) return;
  std::lock_guard<std::mutex> hold(pinned().lock);
  pinned().ranges.erase(static_cast<char*>(pointer));
  free(pointer);
}

// ── streams and events ───────────────────────────────────────────────────────────────────────────────────────────────────────────

class Line {  // the queue and the thread of one stream; never destroyed
 public:
  void submit(std::function<void()> task) {
    std::unique_lock<std::mutex> hold(lock_);
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    ++pending_;
    tasks_.push_back(std::move(task));
    hold.unlock();
    arrived_.notify_one();
  }
  void drain() {
    if (pending_.load() == 0) return;
    std::unique_lock<std::mutex> hold(lock_);
    idle_.wait(hold, [this] { return pending_.load() == 0; });
  }
  void check() {
    std::lock_guard<std::mutex> hold(lock_);
    std::string message = std::exchange(error_, std::string());
    TORCH_CHECK(message.empty(), "work on a stream of fake failed: ", message);
  }
  bool idle() const { return pending_.load() == 0; }

 private:
  void work() {
    for (;;) {
      std::unique_lock<std::mutex> hold(lock_);
      arrived_.wait(hold, [this] { return !tasks_.empty(); });
      auto task = std::move(tasks_.front());
      tasks_.pop_front();
      hold.unlock();
      std::string trouble;
      try {
        task();
      } catch (const c10::Error& error) {
        trouble = error.what_without_backtrace();
      } catch (const std::exception& error) {
        trouble = error.what();
      }
      task = nullptr;  // drops its tensors before anybody is told that it is done
      hold.lock();
      if (error_.empty()) error_ = trouble;
      if (--pending_ == 0) idle_.notify_all();
    }
  }
  std::mutex lock_;
  std::condition_variable arrived_, idle_;
  std::deque<std::function<void()>> tasks_;
  std::atomic<int> pending_{0};
  bool started_ = false;
  std::string error_;
};

struct Lines {
  std::mutex lock;
  std::deque<Line> of[kDevices];
  Lines() {
    for (auto& lines : of) lines.emplace_back();
  }
};

Lines& lines() {
  static auto* it = new Lines;
  return *it;
}

thread_local c10::StreamId current_stream[kDevices] = {};

Line& line(const c10::Stream& stream) {
  std::lock_guard<std::mutex> hold(lines().lock);
  return lines().of[stream.device_index()].at(static_cast<size_t>(stream.id()));
}

Line& current_line(DeviceIndex device) { return line(c10::Stream(c10::Stream::UNSAFE, Device(kFake, device), current_stream[device])); }

void synchronize(DeviceIndex device) {
  size_t count = 0;
  {
    std::lock_guard<std::mutex> hold(lines().lock);
    count = lines().of[device].size();
  }
  for (size_t number = 0; number < count; ++number) {
    auto& one = line(c10::Stream(c10::Stream::UNSAFE, Device(kFake, device), static_cast<c10::StreamId>(number)));
    one.drain();
    one.check();
  }
}

struct Mark {
  std::mutex lock;
  std::condition_variable changed;
  bool done = false;
  std::chrono::steady_clock::time_point at;
  void finish() {
    std::lock_guard<std::mutex> hold(lock);
    at = std::chrono::steady_clock::now();
    done = true;
    changed.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> hold(lock);
    changed.wait(hold, [this] { return done; });
  }
  bool finished() {
    std::lock_guard<std::mutex> hold(lock);
    return done;
  }
};
using Event = std::shared_ptr<Mark>;

Mark& mark_of(void* event) { return **static_cast<Event*>(event); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }
  Device exchangeDevice(Device d) const override {
    Device old = getDevice();
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return Device(kFake, current_device); }
  void setDevice(Device d) const override {
    if (!d.has_index()) return;
    TORCH_CHECK(d.index() < kDevices, "fake:", int(d.index()), " was asked for; there are ", int(kDevices));
    current_device = d.index();
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.has_index()) current_device = d.index();
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(Device d) const override {
    auto index = d.has_index() ? d.index() : current_device;
    return c10::Stream(c10::Stream::UNSAFE, Device(kFake, index), current_stream[index]);
  }
  c10::Stream getDefaultStream(Device d) const override {
    return c10::Stream(c10::Stream::UNSAFE, Device(kFake, d.has_index() ? d.index() : current_device), 0);
  }
  c10::Stream getStreamFromGlobalPool(Device d, bool) const override { return getNewStream(d, 0); }
  c10::Stream getNewStream(Device d, int) const override {
    auto index = d.has_index() ? d.index() : current_device;
    std::lock_guard<std::mutex> hold(lines().lock);
    auto& own = lines().of[index];
    if (own.size() < 33) own.emplace_back();  // then they are handed out in turn, as other runtimes do
    static std::atomic<int64_t> turn{0};
    auto id = own.size() < 33 ? static_cast<int64_t>(own.size()) - 1 : 1 + turn++ % 32;
    return c10::Stream(c10::Stream::UNSAFE, Device(kFake, index), id);
  }
  c10::Stream exchangeStream(c10::Stream s) const override {
    auto old = getStream(s.device());
    current_stream[s.device_index()] = s.id();
    return old;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (*event == nullptr) *event = new Event;
    auto mark = std::make_shared<Mark>();
    *static_cast<Event*>(*event) = mark;
    line(stream).submit([mark] { mark->finish(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    auto mark = *static_cast<Event*>(event);
    line(stream).submit([mark] { mark->wait(); });
  }
  bool queryEvent(void* event) const override { return event == nullptr || mark_of(event).finished(); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) mark_of(event).wait();
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(mark_of(second).at - mark_of(first).at).count();
  }
  bool queryStream(const c10::Stream& stream) const override { return line(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override {
    line(stream).drain();
    line(stream).check();
  }
  void synchronizeDevice(const DeviceIndex device) const override { synchronize(device < 0 ? current_device : device); }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

void resize_bytes(c10::StorageImpl* storage, size_t bytes) {
  auto fresh = allocate_on(bytes, storage->device().index());
  synchronize(storage->device().index());
  size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0) {
    Opened opened;
    opened.add(fresh.get());
    opened.add(storage->data());
    std::memcpy(fresh.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice(Device(kFake, device)); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return device < 0 ? current_device : exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return pinned().holds(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_bytes(storage.unsafeGetStorageImpl(), bytes);
  }
};

// ── kernels ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────────

bool ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kFake; }

// Replace every tensor inside an argument or a result.
IValue change(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& with) {
  if (value.isTensor()) return value.toTensor().defined() ? IValue(with(value.toTensor())) : value;
  if (value.isTensorList()) {
    std::vector<at::Tensor> changed;
    for (const at::Tensor& one : value.toTensorVector()) changed.push_back(with(one));
    return IValue(changed);
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> changed;
    for (const std::optional<at::Tensor>& one : value.toOptionalTensorVector())
      changed.push_back(one && one->defined() ? std::optional<at::Tensor>(with(*one)) : one);
    return IValue(changed);
  }
  return value;
}

at::Tensor over(const c10::Storage& storage, c10::DispatchKeySet keys, const at::Tensor& like) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

// Allocations go to the current device.
class On {
 public:
  explicit On(DeviceIndex device) : before_(std::exchange(current_device, device)) {}
  ~On() { current_device = before_; }

 private:
  DeviceIndex before_;
};

at::Tensor made_on(DeviceIndex device, at::IntArrayRef sizes, at::IntArrayRef strides, c10::ScalarType dtype) {
  On there(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

// The arguments of one call as the kernel sees them: the same bytes, opened.
class Work {
 public:
  IValue in(const IValue& value, bool out) {
    if (value.isDevice()) return value.toDevice().type() == kFake ? IValue(Device(c10::DeviceType::CPU)) : value;
    return change(value, [&](const at::Tensor& tensor) {
      if (!ours(tensor)) return tensor;
      if (out && tensor.numel() == 0) return at::Tensor(at::detail::empty_cpu(tensor.sizes(), tensor.scalar_type()));  // it may have to grow
      return alias(tensor);
    });
  }
  at::Tensor alias(const at::Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = hosts_.find(storage);
    if (found == hosts_.end()) {
      opened_.add(storage->data());
      c10::Storage host(c10::Storage::use_byte_size_t(), storage->nbytes(),
                        c10::DataPtr(storage->mutable_data(), Device(c10::DeviceType::CPU)), nullptr, false);
      origins_.emplace(host.unsafeGetStorageImpl(), tensor.storage());
      found = hosts_.emplace(storage, host).first;
    }
    return over(found->second, c10::DispatchKeySet(c10::DispatchKey::CPU), tensor);
  }
  // A view of an argument's memory, or new memory with a copy of `host`.
  at::Tensor out(const at::Tensor& host, DeviceIndex device, bool& fresh) {
    auto origin = origins_.find(host.storage().unsafeGetStorageImpl());
    fresh = origin == origins_.end();
    if (!fresh) return over(origin->second, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), host);
    auto dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    auto made = made_on(device, dense.sizes(), dense.strides(), dense.scalar_type());
    fill(made, dense);
    return made;
  }
  static void fill(const at::Tensor& made, const at::Tensor& host) {
    auto dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    if (dense.numel() == 0) return;
    Opened opened;
    opened.add(made.storage().data());
    std::memcpy(static_cast<char*>(const_cast<void*>(made.storage().data())) + made.storage_offset() * made.itemsize(),
                dense.const_data_ptr(), dense.nbytes());
  }

 private:
  Opened opened_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> hosts_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> origins_;
};

bool in_a_pool(const void* pointer) {
  std::lock_guard<std::mutex> hold(memory().lock);
  auto found = memory().blocks.find(static_cast<char*>(const_cast<void*>(pointer)));
  return found != memory().blocks.end() && !found->second.counted;
}

// What the capture keeps of an argument or a result: the thing itself where a graph owns it, otherwise its address.
IValue lent(Capture& graph, const std::string& op, const IValue& value) {
  return change(value, [&](const at::Tensor& tensor) {
    if (!ours(tensor) || tensor.storage().data() == nullptr || in_a_pool(tensor.storage().data())) return tensor;
    auto* impl = tensor.storage().unsafeGetStorageImpl();
    auto found = graph.loans.find(impl);
    if (found == graph.loans.end()) {
      c10::Storage borrowed(c10::Storage::use_byte_size_t(), impl->nbytes(), c10::DataPtr(impl->mutable_data(), impl->device()), nullptr, false);
      auto owner = c10::weak_intrusive_ptr<c10::StorageImpl>(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(impl));
      found = graph.loans.emplace(impl, Loan{std::move(owner), std::move(borrowed), op}).first;
    }
    return over(found->second.borrowed, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), tensor);
  });
}

// The owners of all that a graph touches, held for the time of a replay; why there can be none otherwise.
std::string borrow(Capture& graph, std::vector<c10::intrusive_ptr<c10::StorageImpl>>& owners) {
  for (auto& entry : graph.loans) {
    auto& loan = entry.second;
    auto owner = loan.owner.lock();
    auto what = std::to_string(loan.borrowed.nbytes()) + " bytes that " + loan.op + " was captured with";
    if (!owner) return "a replay touches memory that was freed since its capture: " + what + "; keep them, and write new inputs into them";
    if (owner->data() != loan.borrowed.data()) return "a replay touches memory that moved since its capture: " + what + "; capture again";
    owners.push_back(std::move(owner));
  }
  return {};
}

struct Recorded {
  c10::OperatorHandle op;
  std::vector<IValue> arguments, results;
  std::vector<bool> fresh;  // of each result tensor, in order
};

void call(const c10::OperatorHandle& op, Stack& stack) {
  at::AutoDispatchBelowADInplaceOrView below;
  op.callBoxed(&stack);
}

Stack host_arguments(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, Work& work) {
  Stack stack;
  const auto& declared = op.schema().arguments();
  for (size_t i = 0; i < arguments.size(); ++i) stack.push_back(work.in(arguments[i], declared[i].is_out()));
  return stack;
}

void again(const Recorded& one) {
  Work work;
  Stack stack = host_arguments(one.op, one.arguments, work);
  call(one.op, stack);
  size_t number = 0;
  for (size_t i = 0; i < one.results.size(); ++i) {
    std::vector<at::Tensor> kept, made;
    change(one.results[i], [&](const at::Tensor& t) { kept.push_back(t); return t; });
    change(stack[i], [&](const at::Tensor& t) { made.push_back(t); return t; });
    for (size_t j = 0; j < kept.size(); ++j)
      if (one.fresh[number++]) Work::fill(kept[j], made[j]);
  }
}

void keep(Capture& graph, Recorded record) {
  const auto& name = record.op.operator_name().name;
  for (auto& one : record.arguments) one = lent(graph, name, one);
  for (auto& one : record.results) one = lent(graph, name, one);
  graph.steps.push_back([record = std::move(record)] { again(record); });
}

const std::set<std::string> kShapedByData = {"aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_consecutive",
                                             "aten::unique_dim", "aten::repeat_interleave", "aten::_local_scalar_dense"};

// The one device of a call. Refuses host tensors (numbers may come from the host) and a second device.
DeviceIndex device_of(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  DeviceIndex device = -1;
  bool host = false, mask = false;
  for (const auto& argument : arguments) {
    bool index = argument.isTensorList() || argument.isOptionalTensorList();
    change(argument, [&](const at::Tensor& tensor) {
      if (ours(tensor)) {
        TORCH_CHECK(device < 0 || device == tensor.device().index(), op.operator_name().name, ": tensors on fake:", int(device), " and ",
                    tensor.device(), "; all have to be on one device");
        device = tensor.device().index();
        mask = mask || (index && tensor.scalar_type() == c10::ScalarType::Bool);
      } else if (tensor.defined() && tensor.dim() > 0) {
        host = true;
      }
      return tensor;
    });
    if (argument.isDevice() && argument.toDevice().type() == kFake && device < 0) device = Guard().getStream(argument.toDevice()).device_index();
  }
  const auto& name = op.operator_name().name;
  TORCH_CHECK(!(host && device >= 0), name, ": a tensor of ", "the host beside one of fake:", int(device), "; copy it to the device first");
  bool indexed = name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_" || name == "aten::index_put";
  TORCH_CHECK(capture == nullptr || !(kShapedByData.count(name) || (indexed && mask)), name,
              " inside a capture: its result's shape depends on data, which the host would have to wait for");
  return device < 0 ? current_device : device;
}

// Only writes into its arguments, so that nobody has to wait for it.
bool in_place(const c10::OperatorHandle& op, const std::vector<IValue>& arguments) {
  const auto& schema = op.schema();
  if (schema.returns().empty()) return false;
  for (const auto& result : schema.returns())
    if (!result.alias_info() || !result.alias_info()->isWrite() || !result.type()->isSubtypeOf(*c10::TensorType::get())) return false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    if (schema.arguments()[i].name() == "generator") return false;
    if (schema.arguments()[i].is_out() && (!arguments[i].isTensor() || arguments[i].toTensor().numel() == 0)) return false;
  }
  return true;
}

IValue written(const c10::OperatorHandle& op, size_t result, const std::vector<IValue>& arguments) {
  const auto& declared = op.schema().arguments();
  const auto* alias = op.schema().returns()[result].alias_info();
  for (size_t i = 0; i < declared.size(); ++i)
    if (declared[i].alias_info() && *declared[i].alias_info() == *alias) return arguments[i];
  TORCH_CHECK(false, op.operator_name().name, ": no argument is its result");
}

bool writes(const c10::OperatorHandle& op, size_t result) {
  const auto* alias = op.schema().returns()[result].alias_info();
  return alias != nullptr && alias->isWrite();
}

void grow(const c10::OperatorHandle& op, const std::vector<IValue>& arguments, const at::Tensor& device, const at::Tensor& host) {
  if (device.sizes() == host.sizes()) return;
  size_t bytes = static_cast<size_t>(host.numel()) * host.itemsize();
  if (bytes > device.storage().nbytes()) resize_bytes(device.storage().unsafeGetStorageImpl(), bytes);
  device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), 0);
  Work::fill(device, host);
}

void kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto count = op.schema().arguments().size();
  std::vector<IValue> arguments(stack->end() - static_cast<std::ptrdiff_t>(count), stack->end());
  stack->resize(stack->size() - count);
  auto device = device_of(op, arguments);
  auto& here = current_line(device);
  Recorded record{op, arguments, {}, {}};
  if (in_place(op, arguments)) {
    for (size_t i = 0; i < op.schema().returns().size(); ++i) {
      stack->push_back(written(op, i, arguments));
      record.results.push_back(stack->back());
      record.fresh.push_back(false);
    }
    if (capture != nullptr) keep(*capture, record);
    here.submit([record = std::move(record)] { again(record); });
    return;
  }
  here.drain();
  Work work;
  Stack results = host_arguments(op, arguments, work);
  call(op, results);
  for (size_t i = 0; i < results.size(); ++i) {
    if (writes(op, i) && results[i].isTensor()) {
      auto own = written(op, i, arguments);
      if (ours(own.toTensor())) grow(op, arguments, own.toTensor(), results[i].toTensor());
      stack->push_back(own);
      record.fresh.push_back(false);
    } else {
      stack->push_back(change(results[i], [&](const at::Tensor& host) {
        bool fresh = false;
        auto made = work.out(host, device, fresh);
        record.fresh.push_back(fresh);
        return made;
      }));
    }
    record.results.push_back(stack->back());
  }
  if (capture != nullptr) keep(*capture, std::move(record));
}

at::Tensor on_host(const at::Tensor& tensor, Work& work) { return ours(tensor) ? work.alias(tensor) : tensor; }

void copy_now(const at::Tensor& from, const at::Tensor& to) {
  at::AutoDispatchBelowADInplaceOrView below;
  Work work;
  on_host(to, work).copy_(on_host(from, work));
}

bool is_pinned(const at::Tensor& tensor) { return tensor.numel() == 0 || pinned().holds(tensor.const_data_ptr()); }

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto device = (ours(to) ? to : from).device().index();
  bool within = ours(from) && ours(to);
  bool crosses = within && from.device() != to.device();
  bool later = within ? !crosses : non_blocking && is_pinned(ours(from) ? to : from);
  TORCH_CHECK(capture == nullptr || later, "a copy between ", from.device(), " and ", to.device(),
              " inside a capture: the host would have to wait for it; use pinned memory and non_blocking=True");
  if (crosses) synchronize(from.device().index());
  auto& here = current_line(device);
  if (later) {
    if (capture != nullptr) {
      auto source = lent(*capture, "aten::copy_", from).toTensor(), target = lent(*capture, "aten::copy_", to).toTensor();
      capture->steps.push_back([source, target] { copy_now(source, target); });
    }
    here.submit([from, to] { copy_now(from, to); });
  } else {
    here.drain();
    here.check();
    copy_now(from, to);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar scalar(const at::Tensor& tensor) {
  TORCH_CHECK(capture == nullptr, "a number is read from ", tensor.device(), " inside a capture: the host would have to wait for it");
  current_line(tensor.device().index()).drain();
  current_line(tensor.device().index()).check();
  at::AutoDispatchBelowADInplaceOrView below;
  Work work;
  return work.alias(tensor).item();
}

DeviceIndex wanted(std::optional<Device> device) { return device && device->has_index() ? device->index() : current_device; }

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  On there(wanted(device));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return made_on(wanted(device), C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                 dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  int64_t numel = c10::multiply_integers(sizes);
  size_t bytes = static_cast<size_t>(numel + self.storage_offset()) * self.itemsize();
  if (bytes > self.storage().nbytes()) resize_bytes(self.storage().unsafeGetStorageImpl(), bytes);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  auto start = offset ? std::optional<int64_t>(offset->expect_int()) : std::nullopt;
  return at::native::as_strided_tensorimpl(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), start);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }

at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

int64_t attention_by_parts(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                           std::optional<double>, bool) {
  return 0;
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &scalar);
  m.impl("_fused_sdp_choice", &attention_by_parts);
}

}  // namespace

// ── what the Python module calls ─────────────────────────────────────────────────────────────────────────────────────────────────

extern "C" {

void fake_register() {
  static auto* hooks = new Hooks;
  c10::register_privateuse1_backend("fake");
  at::RegisterPrivateUse1HooksInterface(hooks);
}

int64_t fake_used(int device) {
  std::lock_guard<std::mutex> hold(memory().lock);
  return memory().used[device];
}

int64_t fake_capacity() { return kCapacity; }

int fake_begin() {
  if (capture != nullptr) return 0;
  capture = new Capture;
  capture->device = current_device;
  return 1;
}

void* fake_end() { return std::exchange(capture, nullptr); }

int64_t fake_bytes(void* captured) { return static_cast<Capture*>(captured)->bytes; }

// Why it cannot be run, or null.
const char* fake_replay(void* captured) {
  static thread_local std::string trouble;
  auto* steps = static_cast<Capture*>(captured);
  std::vector<c10::intrusive_ptr<c10::StorageImpl>> owners;
  trouble = borrow(*steps, owners);
  if (!trouble.empty()) return trouble.c_str();
  current_line(steps->device).submit([steps, owners = std::move(owners)] {
    for (auto& step : steps->steps) step();
  });
  return nullptr;
}

void fake_drop(void* captured) {
  auto* steps = static_cast<Capture*>(captured);
  synchronize(steps->device);
  delete steps;
}
}
