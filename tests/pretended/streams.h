// The streams and events of the pretended device: each stream is a thread that runs a queue.
//
// Owns the threads, which live as long as the process. What is pushed is launches of operators,
// copies, event records, event waits and sleeps: all of it happens later than the call returns. A
// launch that fails is reported by every call from then on, as CUDA does: the process has lost its
// device. Streams are those of torch's pool, which gives the first again after the last. Any thread
// may enter, the main one or one that has said on which device it works: on CUDA another would make
// a context on the first GPU, which may be another rank's. The current stream is of the calling
// thread, as CUDA's.
#pragma once

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace pretended {

// Memory that another stream than its own uses: memory.h gives it back when that has passed.
void record_use(const c10::DataPtr& data, c10::StreamId stream);

// The first launch that failed, for good.
class Failure {
 public:
  static Failure& get() {
    static auto* failure = new Failure();
    return *failure;
  }
  void keep(const std::string& what) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (what_.empty()) what_ = what;
  }
  bool any() {
    std::lock_guard<std::mutex> hold(mutex_);
    return !what_.empty();
  }
  void raise() {
    std::lock_guard<std::mutex> hold(mutex_);
    TORCH_CHECK(what_.empty(), "CUDA error: a launch failed: ", what_);
  }

 private:
  std::mutex mutex_;
  std::string what_;
};

// What every call does first.
class Entered {
 public:
  static void set_device() { known() = true; }
  static void check() {
    static const auto first = std::this_thread::get_id();  // the main thread loads the library
    TORCH_CHECK(known() || std::this_thread::get_id() == first,
                "a thread that has set no device: it would make a context on the first GPU");
    Failure::get().raise();
  }

 private:
  static bool& known() {
    static thread_local bool found = false;
    return found;
  }
};

class StreamThread {
 public:
  StreamThread() {
    std::thread([this] { run(); }).detach();
  }

  void push(std::function<void()> work) {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_all();
  }
  // Work that comes before the next that may write memory, wherever that stands then: a wait of
  // the stream, or an event, writes none.
  void defer(std::function<void()> work) {
    std::lock_guard<std::mutex> hold(mutex_);
    deferred_.push_back(std::move(work));
  }
  void push_deferred() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      for (auto& work : deferred_) queue_.push_back(std::move(work));
      deferred_.clear();
    }
    changed_.notify_all();
  }
  bool idle() {
    std::lock_guard<std::mutex> hold(mutex_);
    return queue_.empty() && !busy_;
  }
  void synchronize() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return queue_.empty() && !busy_; });
    hold.unlock();
    Failure::get().raise();
  }

 private:
  void run() {
    std::unique_lock<std::mutex> hold(mutex_);
    for (;;) {
      changed_.wait(hold, [&] { return !queue_.empty(); });
      std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      hold.unlock();
      try {
        work();
      } catch (const std::exception& error) {
        Failure::get().keep(error.what());
      }
      work = nullptr;  // what it holds is dropped before the stream counts as idle
      hold.lock();
      busy_ = false;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> queue_, deferred_;
  bool busy_ = false;
};

class Streams {
 public:
  static Streams& get() {
    static auto* streams = new Streams();
    return *streams;
  }

  StreamThread& of(c10::StreamId id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto& stream = threads_[id];
    if (!stream) stream = std::make_unique<StreamThread>();
    return *stream;
  }
  c10::StreamId make() { return next_++ % kPool + 1; }
  void synchronize() {
    for (auto* stream : all()) stream->synchronize();
  }
  void push_deferred() {
    for (auto* stream : all()) stream->push_deferred();
  }

  static c10::StreamId& current() {
    static thread_local c10::StreamId id = 0;
    return id;
  }

  // Seconds that every copy, and every launch, waits at most, drawn anew for each: other orders of
  // the same run.
  std::atomic<double> delay_s{0.0};
  std::atomic<double> launch_delay_s{0.0};
  static void wait_a_little(double most_s) {
    if (most_s <= 0) return;
    static thread_local std::mt19937 random(std::random_device{}());
    std::uniform_real_distribution<> part(0, most_s);
    std::this_thread::sleep_for(std::chrono::duration<double>(part(random)));
  }

 private:
  std::vector<StreamThread*> all() {
    std::lock_guard<std::mutex> hold(mutex_);
    std::vector<StreamThread*> found;
    for (auto& thread : threads_) found.push_back(thread.second.get());
    return found;
  }

  std::mutex mutex_;
  std::map<c10::StreamId, std::unique_ptr<StreamThread>> threads_;
  static constexpr c10::StreamId kPool = 32;
  std::atomic<c10::StreamId> next_{0};
};

inline StreamThread& current_stream() { return Streams::get().of(Streams::current()); }

// One record of an event; a second record of the same event is another.
class Recorded {
 public:
  void fire() {
    {
      std::lock_guard<std::mutex> hold(mutex_);
      done_ = true;
      at_ = std::chrono::steady_clock::now();
    }
    changed_.notify_all();
  }
  bool done() {
    std::lock_guard<std::mutex> hold(mutex_);
    return done_;
  }
  std::chrono::steady_clock::time_point wait() {
    std::unique_lock<std::mutex> hold(mutex_);
    changed_.wait(hold, [&] { return done_; });
    return at_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool done_ = false;
  std::chrono::steady_clock::time_point at_;
};

// What autograd, torch.Stream and torch.Event ask of a device.
struct Guard final : public c10::impl::DeviceGuardImplInterface {
  using Event = std::shared_ptr<Recorded>;

  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, 0); }
  c10::Device exchangeDevice(c10::Device device) const override {
    setDevice(device);
    return getDevice();
  }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "CUDA error: invalid device ordinal");
    Entered::set_device();
  }
  void uncheckedSetDevice(c10::Device) const noexcept override { Entered::set_device(); }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }

  c10::Stream getStream(c10::Device) const override { return named(Streams::current()); }
  c10::Stream getDefaultStream(c10::Device) const override { return named(0); }
  c10::Stream getNewStream(c10::Device, int) const override { return named(Streams::get().make()); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return named(Streams::get().make());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return named(std::exchange(Streams::current(), stream.id()));
  }
  bool queryStream(const c10::Stream& stream) const override { return of(stream).idle(); }
  void synchronizeStream(const c10::Stream& stream) const override { of(stream).synchronize(); }
  void synchronizeDevice(const c10::DeviceIndex) const override { Streams::get().synchronize(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    record_use(data, stream.id());
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    Entered::check();
    if (*event == nullptr) *event = new Event();
    auto recorded = std::make_shared<Recorded>();
    *static_cast<Event*>(*event) = recorded;
    of(stream).push([recorded] { recorded->fire(); });
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto recorded = of(event)) of(stream).push([recorded] { recorded->wait(); });
  }
  bool queryEvent(void* event) const override {
    Entered::check();
    auto recorded = of(event);
    return recorded == nullptr || recorded->done();
  }
  void synchronizeEvent(void* event) const override {
    Entered::check();
    if (auto recorded = of(event)) recorded->wait();
    Failure::get().raise();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(of(begin) && of(end), "both events must be recorded before their times are asked");
    const std::chrono::duration<double, std::milli> apart = of(end)->wait() - of(begin)->wait();
    return apart.count();
  }

 private:
  static c10::Stream named(c10::StreamId id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, 0), id);
  }
  static StreamThread& of(const c10::Stream& stream) { return Streams::get().of(stream.id()); }
  static Event of(void* event) { return event == nullptr ? nullptr : *static_cast<Event*>(event); }
};

}  // namespace pretended
