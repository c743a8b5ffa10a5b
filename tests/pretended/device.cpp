// A pretended CUDA device for torch's build without CUDA, torch 2.13: tests of the CUDA path run
// where there is no GPU.
//
// Owns torch's registrations for the device type "cuda": allocators, device guard, hooks and
// operators. Pretends: memory that the host may not touch (memory.h); streams and events
// (streams.h); copies that wait for nothing from registered memory, and for the stream otherwise;
// CUDA's refusals of mixed devices and of copies across a registered range's border; autograd's
// thread of a device; launches that return before they have happened ([Note: launch]). Cannot show:
// speed, Triton's programs, NCCL. Names of torch that it uses are private ones, and change from
// version to version; install.py refuses others.
//
// [Note: launch] What is computed, the CPU's kernel on the bytes behind the addresses, is pushed on
// the current stream and holds none of the tensors' memory, as a kernel on a GPU. The shapes of its
// results are those that the same kernel gives for zeros, asked once for arguments of the same
// shapes and numbers. Operators whose results' shapes depend on values, and those that draw random
// numbers wait for the stream and run at once.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/view_native.h>
#include <c10/util/env.h>
#include <torch/extension.h>

#include <array>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "streams.h"
#include "workspaces.h"

namespace pretended {
namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

DeviceAllocator device_allocator;
PinnedAllocator pinned_allocator;
REGISTER_ALLOCATOR(c10::kCUDA, &device_allocator);
C10_REGISTER_GUARD_IMPL(CUDA, Guard);

struct Hooks final : public at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDART() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isPinnedPtr(const void* data) const override { return Registered::get().holds(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  int getNumGPUs() const override { return 1; }
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(c10::kCUDA, 0); }
  void deviceSynchronize(c10::DeviceIndex) const override { Streams::get().synchronize(); }
};

// -- making and viewing ---------------------------------------------------------------------------
const c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

Tensor empty(SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef size, SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                           kKeys, c10::dtype_or_default(dtype));
}

Tensor as_strided(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride,
                  std::optional<SymInt> offset) {
  std::optional<int64_t> begin;
  if (offset) begin = offset->expect_int();
  return at::native::as_strided_tensorimpl(tensor, C10_AS_INTARRAYREF_SLOW(size),
                                           C10_AS_INTARRAYREF_SLOW(stride), begin);
}

Tensor reshape_alias(const Tensor& tensor, SymIntArrayRef size, SymIntArrayRef stride) {
  return as_strided(tensor, size, stride, tensor.storage_offset());
}

Tensor view(const Tensor& tensor, SymIntArrayRef size) {
  return at::native::view(tensor, C10_AS_INTARRAYREF_SLOW(size));
}

const Tensor& resize(const Tensor& self, SymIntArrayRef symbolic,
                     std::optional<at::MemoryFormat> format) {
  const auto size = C10_AS_INTARRAYREF_SLOW(symbolic);
  const size_t numel = c10::multiply_integers(size);
  const size_t bytes = (numel + self.storage_offset()) * self.element_size();
  auto* tensor = self.unsafeGetTensorImpl();
  auto& storage = const_cast<c10::Storage&>(tensor->unsafe_storage());
  if (storage.nbytes() < bytes) {
    auto larger = device_allocator.allocate(bytes);
    if (storage.nbytes() > 0) {
      current_stream().synchronize();
      std::memcpy(shadow(larger.get()), shadow(storage.data()), storage.nbytes());
    }
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  tensor->set_sizes_contiguous(size);
  if (format) tensor->empty_tensor_restride(*format);
  return self;
}

Tensor& set_part(Tensor& self, at::Storage source, SymInt offset, SymIntArrayRef size,
                 SymIntArrayRef stride) {
  TORCH_CHECK(source.device() == self.device(), "Attempted to set the storage of a tensor on ",
              self.device(), " to a storage on ", source.device());
  auto* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (stride.empty() && !sizes.empty()) {
    tensor->set_sizes_contiguous(sizes);
  } else {
    tensor->set_sizes_and_strides(sizes, C10_AS_INTARRAYREF_SLOW(stride));
  }
  return self;
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sym_sizes(),
                  source.sym_strides());
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const SymInt numel(static_cast<int64_t>(source.nbytes() / self.element_size()));
  const SymInt one(1);
  return set_part(self, std::move(source), 0, SymIntArrayRef(&numel, 1), SymIntArrayRef(&one, 1));
}

Tensor& set_nothing(Tensor& self) { return set_tensor(self, at::empty({0}, self.options())); }

void record_stream(Tensor& tensor, at::Stream stream) {
  record_use(tensor.storage().data_ptr(), stream.id());
}

// -- computing and copying ------------------------------------------------------------------------

// A CPU tensor over the same bytes, which it does not keep alive; only the stream's own work may
// read it before the stream is empty.
Tensor over_shadow(const Tensor& tensor) {
  if (!tensor.is_cuda()) return tensor.detach();
  const auto& storage = tensor.storage();
  char* bytes = storage.nbytes() > 0 ? shadow(storage.data()) : nullptr;
  const c10::Storage same(c10::Storage::use_byte_size_t(), storage.nbytes(),
                          at::DataPtr(bytes, c10::Device(c10::kCPU)), nullptr, false);
  auto found = at::empty({0}, tensor.options().device(c10::kCPU).requires_grad(false));
  return found.set_(same, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

char* bytes_of(const Tensor& tensor) {
  auto* data = const_cast<void*>(tensor.const_data_ptr());
  return tensor.is_cuda() ? shadow(data) : static_cast<char*>(data);
}

// Counts what was launched, and what had to wait for its stream instead.
std::atomic<size_t> num_launches{0}, num_waits{0};

template <typename Work>
void push_launch(Work&& work) {
  Entered::check();
  ++num_launches;
  current_stream().push_deferred();
  current_stream().push([work = std::forward<Work>(work)]() mutable {
    const at::AutoDispatchBelowADInplaceOrView below;
    Streams::wait_a_little(Streams::get().launch_delay_s);
    work();
  });
}

Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (self.numel() == 0 || self.is_same(source)) return self;
  const Tensor expanded = source.sizes() == self.sizes() ? source : source.expand_as(self);
  const bool plain = self.scalar_type() == source.scalar_type() && self.is_contiguous() &&
                     expanded.is_contiguous();
  if (plain && self.is_cuda() != source.is_cuda()) {  // cudaMemcpyAsync
    const Tensor& host = self.is_cuda() ? expanded : self;
    TORCH_CHECK(!Registered::get().borders_inside(host.const_data_ptr(), host.nbytes()),
                "CUDA error: invalid argument (a copy spans registered and other memory)");
    Entered::check();
    const void* address = host.const_data_ptr();
    if (Registered::get().holds(address)) {
      Registered::get().count_copy(address, 1);
      current_stream().push_deferred();
      current_stream().push(
          [to = bytes_of(self), from = bytes_of(expanded), n = self.nbytes(), address] {
            Streams::wait_a_little(Streams::get().delay_s);
            std::memcpy(to, from, n);
            Registered::get().count_copy(address, -1);
          });
      if (!non_blocking) current_stream().synchronize();
      return self;
    }
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  if (self.is_cuda() && source.is_cuda() && !expanded.is_conj() && !self.is_conj()) {
    push_launch([to = over_shadow(self), from = over_shadow(expanded)] { to.copy_(from); });
    return self;
  }
  current_stream().synchronize();
  over_shadow(self).copy_(over_shadow(expanded.resolve_conj()));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& target, bool non_blocking) {
  Tensor written = target;
  return copy(written, source, non_blocking);
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& target) {
  if (target.sizes() != source.sizes()) {
    at::native::resize_(target, source.sizes(), std::nullopt);
  }
  return copy_from(source, target, false);
}

at::Scalar scalar_of(const Tensor& tensor) {
  current_stream().synchronize();
  return at::_local_scalar_dense(over_shadow(tensor));
}

// The CPU's histc takes floating dtypes alone, CUDA's integers too.
Tensor histc(const Tensor& tensor, int64_t bins, const at::Scalar& low, const at::Scalar& high) {
  current_stream().synchronize();
  const Tensor counts = at::histc(over_shadow(tensor).to(at::kFloat), bins, low, high);
  return counts.to(tensor.options());
}

// Attention as CUDA's kernels declare it: beside the output and the rows' sums they return numbers,
// sequences that are not there and the generator's place. The CPU's kernel computes it.
using Mask = std::optional<Tensor>;

bool low_precision(const Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

// The first that can, in the order of a GPU of compute capability 9.0 with cuDNN 9.16 or later.
int64_t sdp_choice(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
                   double dropout, bool, std::optional<double>, bool) {
  auto& context = at::globalContext();  // what the program allows
  static const bool preferred = [&] {
    if (c10::utils::check_env("TORCH_CUDNN_SDPA_DEPRIORITIZED") == true) return false;
    context.setSDPPriorityOrder({3, 1, 2, 0});
    return true;
  }();
  (void)preferred;
  const bool any_order =
      !context.deterministicAlgorithms() || context.deterministicAlgorithmsWarnOnly();
  const auto fits = [](const Tensor& tensor) {
    return tensor.size(3) <= 128 && tensor.size(3) % 8 == 0;
  };
  const bool four = query.dim() == 4 && dropout == 0;
  for (const auto backend : context.sDPPriorityOrder()) {
    bool can = false;
    if (backend == at::SDPBackend::cudnn_attention) {
      can = four && context.userEnabledCuDNNSDP() && any_order && low_precision(query) &&
            fits(query) && fits(value) && key.size(2) != 1 &&
            (!mask || (!mask->requires_grad() && (mask->dim() == 2 || mask->dim() == 4)));
    } else if (backend == at::SDPBackend::flash_attention) {
      can = four && context.userEnabledFlashSDP() && low_precision(query) && !mask;
    } else if (backend == at::SDPBackend::efficient_attention) {
      can = four && context.userEnabledMemEfficientSDP() && query.size(1) == key.size(1) && !mask;
    } else if (backend == at::SDPBackend::math) {
      can = context.userEnabledMathSDP();
    }
    if (can) return static_cast<int64_t>(backend);
  }
  TORCH_CHECK(false, "No viable backend for scaled_dot_product_attention was found.");
}

// Computes into `output` and `sums`, [batch, heads, rows] in any layout.
void attend(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
            bool causal, std::optional<double> scale, const Tensor& output, const Tensor& sums) {
  push_launch([q = over_shadow(query), k = over_shadow(key), v = over_shadow(value),
               mask = mask ? Mask(over_shadow(*mask)) : Mask(), causal, scale,
               to = over_shadow(output), rest = over_shadow(sums)] {
    const auto found =
        at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, mask, scale);
    to.copy_(std::get<0>(found));
    rest.copy_(std::get<1>(found));
  });
}

std::pair<Tensor, Tensor> attended(const Tensor& query, const Tensor& key, const Tensor& value,
                                   bool causal, std::optional<double> scale) {
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  const auto options = query.options();
  const Tensor output = at::empty({batch, rows, heads, value.size(3)}, options).transpose(1, 2);
  const Tensor sums = at::empty({batch, heads, rows}, options.dtype(at::kFloat));
  attend(query, key, value, std::nullopt, causal, scale, output, sums);
  return {output, sums};
}

std::tuple<Tensor, Tensor, Tensor> attended_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor& mask, bool causal,
    std::optional<double> scale) {
  std::tuple<Tensor, Tensor, Tensor> found{at::empty_like(query), at::empty_like(key),
                                           at::empty_like(value)};
  const auto& [of_query, of_key, of_value] = found;
  const std::vector<Tensor> targets{over_shadow(of_query), over_shadow(of_key),
                                    over_shadow(of_value)};
  const std::vector<Tensor> given{over_shadow(gradient), over_shadow(query),  over_shadow(key),
                                  over_shadow(value),    over_shadow(output), over_shadow(sums)};
  push_launch([targets, given, mask = mask.defined() ? Mask(over_shadow(mask)) : Mask(), causal,
               scale] {
    const auto [q, k, v] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        given[0], given[1], given[2], given[3], given[4], given[5].contiguous(), 0.0, causal, mask,
        scale);
    targets[0].copy_(q), targets[1].copy_(k), targets[2].copy_(v);
  });
  return found;
}

using Nine = std::tuple<Tensor, Tensor, Tensor, Tensor, SymInt, SymInt, Tensor, Tensor, Tensor>;

Nine flash(const Tensor& query, const Tensor& key, const Tensor& value, double, bool causal, bool,
           std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [output, sums] = attended(query, key, value, causal, scale);
  const auto place = [&] { return at::empty({2}, query.options().dtype(at::kUInt64)); };
  return {output, sums, Tensor(), Tensor(), query.size(2), key.size(2), place(), place(),
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, SymInt, SymInt, double,
    bool causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  return attended_backward(gradient, query, key, value, output, sums, {}, causal, scale);
}

// The output is laid out as the query is, the sums with heads behind rows, as cuDNN's.
Nine cudnn(const Tensor& query, const Tensor& key, const Tensor& value, const Mask& mask,
           bool with_sums, double, bool causal, bool, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  const auto options = query.options();
  const bool rows_first = query.stride(2) >= query.stride(1);
  const Tensor output =
      rows_first ? at::empty({batch, rows, heads, value.size(3)}, options).transpose(1, 2)
                 : at::empty({batch, heads, rows, value.size(3)}, options);
  const Tensor sums =
      at::empty({batch, rows, heads, 1}, options.dtype(at::kFloat)).transpose(1, 2);
  attend(query, key, value, mask, causal, scale, output, sums.squeeze(-1));
  const auto place = [&] { return at::zeros({1}, options.dtype(at::kLong)); };
  return {output, with_sums ? sums : Tensor(), Tensor(), Tensor(), query.size(2), key.size(2),
          place(), place(), Tensor()};
}

std::tuple<Tensor, Tensor, Tensor> cudnn_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, const Tensor& mask,
    const Tensor&, const Tensor&, SymInt, SymInt, double, bool causal,
    std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  TORCH_CHECK(sums.dim() == 4, "cuDNN's attention: sums of [batch, heads, rows, 1]");
  return attended_backward(gradient, query, key, value, output, sums.squeeze(-1), mask, causal,
                           scale);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient(const Tensor& query, const Tensor& key,
                                                     const Tensor& value, const Mask&, bool, double,
                                                     bool causal, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [output, sums] = attended(query, key, value, causal, scale);
  const auto place = [] { return at::empty({}, at::dtype(at::kLong)); };  // on the host
  return {output, sums, place(), place()};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> efficient_backward(
    const Tensor& gradient, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor&, const Tensor& output, const Tensor& sums, const Tensor&, const Tensor&, double,
    std::array<bool, 4>, bool causal, std::optional<double> scale) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [q, k, v] =
      attended_backward(gradient, query, key, value, output, sums, {}, causal, scale);
  return {q, k, v, Tensor()};
}

// -- every other operator: the CPU's, at once -----------------------------------------------------

// Operators that take host and device tensors together, on a GPU as well.
const std::set<std::string> kMixing = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::_unsafe_index.Tensor",
    "aten::index_put",    "aten::index_put_",       "aten::_index_put_impl_",
    "aten::_to_copy",     "aten::_to_cpu",          "aten::_copy_from"};

void refuse_mixed(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  bool on_device = false, on_host = false;
  const auto look = [&](const Tensor& tensor) {
    if (!tensor.defined()) return;
    on_device = on_device || tensor.is_cuda();
    on_host = on_host || (!tensor.is_cuda() && tensor.dim() > 0);  // host scalars are allowed
  };
  for (const auto& argument : torch::jit::last(stack, op.schema().arguments().size())) {
    if (argument.isTensor()) {
      look(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) look(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) look(tensor.value_or(Tensor()));
    }
  }
  if (!on_device || !on_host) return;
  const std::string name = c10::toString(op.operator_name());
  TORCH_CHECK(kMixing.count(name) > 0, "Expected all tensors to be on the same device, but found ",
              "at least two devices, cuda:0 and cpu! (", name, ")");
}

bool writes(const c10::AliasInfo* alias) { return alias != nullptr && alias->isWrite(); }

// Whether the operator's results can be made before it has run.
bool may_be_launched(const c10::OperatorHandle& op) {
  for (const auto tag : {at::Tag::nondeterministic_seeded, at::Tag::data_dependent_output,
                         at::Tag::dynamic_output_shape}) {
    if (op.hasTag(tag)) return false;
  }
  for (const auto& result : op.schema().returns()) {
    if (result.type()->kind() != c10::TypeKind::TensorType) return false;
    if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) return false;
  }
  return op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
}

bool plain(const Tensor& tensor) {
  return !tensor.defined() || ((tensor.is_cuda() || tensor.is_cpu()) && tensor.has_storage() &&
                               tensor.layout() == at::kStrided && !tensor.is_neg());
}

// A host tensor as it is now: the program may write it before the launch happens.
Tensor host_values(const Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  Tensor found = tensor.detach().clone();
  found.unsafeGetTensorImpl()->set_wrapped_number(
      tensor.unsafeGetTensorImpl()->is_wrapped_number());
  return found;
}

// Zeros on the host in the tensor's shape; a host tensor stays what it is.
Tensor zeros_like_it(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return host_values(tensor);
  auto found = at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(),
                                             tensor.options().device(c10::kCPU));
  if (found.nbytes() > 0) {
    std::memset(found.storage().mutable_data(), 0, found.storage().nbytes());
  }
  return found;
}

// What the launch computes with: the bytes behind a device tensor, or a host tensor's values now.
Tensor for_launch(const Tensor& tensor) {
  return tensor.defined() && tensor.is_cuda() ? over_shadow(tensor) : host_values(tensor);
}

// The argument with every tensor in it changed by `change`; false for what cannot be launched.
template <typename Change>
bool changed(const c10::IValue& argument, c10::IValue* found, const Change& change) {
  if (argument.isTensor()) {
    if (!plain(argument.toTensor())) return false;
    *found = change(argument.toTensor());
  } else if (argument.isTensorList()) {
    c10::List<Tensor> tensors;
    for (const Tensor& tensor : argument.toTensorVector()) {
      if (!plain(tensor)) return false;
      tensors.push_back(change(tensor));
    }
    *found = tensors;
  } else if (argument.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> tensors;
    for (const auto& tensor : argument.toOptionalTensorVector()) {
      if (tensor && !plain(*tensor)) return false;
      tensors.push_back(tensor ? std::optional<Tensor>(change(*tensor)) : std::nullopt);
    }
    *found = tensors;
  } else if (argument.isDevice() || argument.isGenerator() || argument.isStorage()) {
    return false;
  } else {
    *found = argument;
  }
  return true;
}

template <typename Change>
bool changed(const std::vector<c10::IValue>& arguments, torch::jit::Stack* found,
             const Change& change) {
  for (const auto& argument : arguments) {
    found->emplace_back();
    if (!changed(argument, &found->back(), change)) return false;
  }
  return true;
}

// The shapes of one call's results, and of what it writes.
struct Shape {
  bool defined = false;
  std::vector<int64_t> sizes, strides;
  at::ScalarType dtype = at::kFloat;
};
struct Shapes {
  bool known = false;
  std::vector<Shape> results, arguments;
};

Shape shape_of(const c10::IValue& value) {
  if (!value.isTensor() || !value.toTensor().defined()) return {};
  Tensor tensor = value.toTensor();
  if (!tensor.is_non_overlapping_and_dense()) tensor = tensor.contiguous();
  return {true, tensor.sizes().vec(), tensor.strides().vec(), tensor.scalar_type()};
}

Shapes ask(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  torch::jit::Stack stack;
  if (!may_be_launched(op) || !changed(arguments, &stack, zeros_like_it)) return {};
  const torch::jit::Stack outs = stack;  // an `out` is resized there
  try {
    op.callBoxed(&stack);
  } catch (const std::exception&) {
    return {};  // said again when it is computed
  }
  Shapes found{true, {}, {}};
  for (const auto& result : stack) found.results.push_back(shape_of(result));
  for (const auto& argument : outs) found.arguments.push_back(shape_of(argument));
  return found;
}

// As `ask` says, asked once.
const Shapes& shapes_of(const c10::OperatorHandle& op, const std::vector<c10::IValue>& arguments) {
  static auto* known = new std::map<std::string, std::unique_ptr<Shapes>>();
  static auto* mutex = new std::mutex();
  std::ostringstream key;
  key << op.operator_name();
  const auto add = [&](const Tensor& tensor) {
    key << '|';
    if (!tensor.defined()) return;
    key << tensor.device().type() << tensor.scalar_type() << tensor.sizes() << plain(tensor)
        << tensor.unsafeGetTensorImpl()->is_wrapped_number();
    if (tensor.layout() == at::kStrided) key << tensor.strides();
  };
  for (const auto& argument : arguments) {
    key << ';';
    if (argument.isTensor()) {
      add(argument.toTensor());
    } else if (argument.isTensorList()) {
      for (const Tensor& tensor : argument.toTensorVector()) add(tensor);
    } else if (argument.isOptionalTensorList()) {
      for (const auto& tensor : argument.toOptionalTensorVector()) add(tensor.value_or(Tensor()));
    } else {
      key << argument;
    }
  }
  {
    std::lock_guard<std::mutex> hold(*mutex);
    const auto found = known->find(key.str());
    if (found != known->end()) return *found->second;
  }
  auto found = std::make_unique<Shapes>(ask(op, arguments));
  std::lock_guard<std::mutex> hold(*mutex);
  return *known->emplace(key.str(), std::move(found)).first->second;
}

// The operator's results, which are still to be computed; false where that cannot be.
bool launch(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto last = torch::jit::last(*stack, schema.arguments().size());
  const std::vector<c10::IValue> arguments(last.begin(), last.end());
  const at::AutoDispatchBelowADInplaceOrView below;
  const Shapes& shapes = shapes_of(op, arguments);
  if (!shapes.known) return false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const Shape& shape = shapes.arguments[i];
    if (!writes(schema.arguments()[i].alias_info()) || !shape.defined) continue;
    const Tensor& written = arguments[i].toTensor();
    if (!written.is_cuda()) return false;
    if (written.sizes() != shape.sizes) at::native::resize_(written, shape.sizes, std::nullopt);
  }
  torch::jit::Stack inputs, results;
  if (!changed(arguments, &inputs, for_launch)) return false;
  std::vector<std::pair<size_t, Tensor>> targets;
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto* alias = schema.returns()[i].alias_info();
    if (alias == nullptr) {
      const Shape& shape = shapes.results[i];
      if (!shape.defined) {
        results.emplace_back(Tensor());
        continue;
      }
      Tensor found = at::detail::empty_strided_generic(shape.sizes, shape.strides,
                                                       &device_allocator, kKeys, shape.dtype);
      targets.emplace_back(i, over_shadow(found));
      results.emplace_back(std::move(found));
      continue;
    }
    for (size_t j = 0; j < arguments.size(); ++j) {
      const auto* of_argument = schema.arguments()[j].alias_info();
      if (of_argument != nullptr && *of_argument == *alias) results.push_back(arguments[j]);
    }
  }
  TORCH_CHECK(results.size() == schema.returns().size(), "results of ", op.operator_name());
  push_launch([op, inputs = std::move(inputs), targets = std::move(targets)]() mutable {
    op.callBoxed(&inputs);
    for (auto& [i, target] : targets) {
      const Tensor& found = inputs[i].toTensor();
      TORCH_CHECK(target.sizes() == found.sizes() && target.scalar_type() == found.scalar_type(),
                  op.operator_name(), " gives other shapes for zeros");
      target.copy_(found);
    }
  });
  torch::jit::drop(*stack, arguments.size());
  for (auto& result : results) stack->push_back(std::move(result));
  return true;
}

// The device's own random numbers: those of the host's generator in a state that is not the host's.
class Chance {
 public:
  static Chance& get() {
    static auto* chance = new Chance();
    return *chance;
  }
  Tensor state() {
    std::lock_guard<std::mutex> hold(mutex_);
    return state_.clone();
  }
  void set_state(const Tensor& state) {
    std::lock_guard<std::mutex> hold(mutex_);
    state_ = state.clone();
  }
  void seed(int64_t seed) { set_state(at::detail::createCPUGenerator(seed).get_state()); }
  template <typename Work>
  void draw(Work&& work) {
    std::lock_guard<std::mutex> hold(mutex_);
    at::Generator host = at::detail::getDefaultCPUGenerator();
    const Tensor before = host.get_state();
    host.set_state(state_);
    work();
    state_ = host.get_state();
    host.set_state(before);
  }

 private:
  std::mutex mutex_;
  Tensor state_ = at::detail::createCPUGenerator(0).get_state();
};

// Operators that are products of cuBLAS on a GPU.
const std::set<std::string> kProducts = {
    "aten::mm",  "aten::addmm", "aten::addmm_",    "aten::bmm",      "aten::baddbmm",
    "aten::mv",  "aten::addmv", "aten::baddbmm_",  "aten::addbmm",   "aten::_addmm_activation",
    "aten::dot", "aten::vdot"};

void take_workspaces(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
  if (kProducts.count(op.schema().name()) == 0) return;
  const Tensor& first = torch::jit::last(stack, op.schema().arguments().size())[0].toTensor();
  const bool adds = op.schema().name().rfind("aten::addmm", 0) == 0;
  Workspaces::get().multiplies(adds && first.dim() == 1);
}

void on_the_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  refuse_mixed(op, *stack);
  take_workspaces(op, *stack);
  if (launch(op, stack)) return;
  ++num_waits;
  Entered::check();
  current_stream().synchronize();
  if (!op.hasTag(at::Tag::nondeterministic_seeded)) return at::native::cpu_fallback(op, stack);
  Chance::get().draw([&] { at::native::cpu_fallback(op, stack); });
}

}  // namespace
}  // namespace pretended

namespace at {
namespace {
using PretendedHooks = pretended::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, PretendedHooks)
}  // namespace
}  // namespace at

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&pretended::on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", pretended::empty);
  library.impl("empty_strided", pretended::empty_strided);
  library.impl("as_strided", pretended::as_strided);
  library.impl("_reshape_alias", pretended::reshape_alias);
  library.impl("view", pretended::view);
  library.impl("resize_", pretended::resize);
  library.impl("set_.source_Storage_storage_offset", pretended::set_part);
  library.impl("set_.source_Tensor", pretended::set_tensor);
  library.impl("set_.source_Storage", pretended::set_storage);
  library.impl("set_", pretended::set_nothing);
  library.impl("record_stream", pretended::record_stream);
  library.impl("copy_", pretended::copy);
  library.impl("_copy_from", pretended::copy_from);
  library.impl("_copy_from_and_resize", pretended::copy_from_and_resize);
  library.impl("_local_scalar_dense", pretended::scalar_of);
  library.impl("histc", pretended::histc);
  // Composed of other operators where a device has no kernel of its own; the CPU has one.
  library.impl("native_layer_norm",
               torch::CppFunction::makeFromBoxedFunction<&pretended::on_the_host>());
  // They choose among kernels by the device; a depthwise one is a GPU's alone.
  for (const char* name : {"convolution", "convolution_backward"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&pretended::on_the_host>());
  }
  library.impl("_fused_sdp_choice", pretended::sdp_choice);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&pretended::sdp_choice);
  library.impl("_scaled_dot_product_flash_attention", pretended::flash);
  library.impl("_scaled_dot_product_flash_attention_backward", pretended::flash_backward);
  library.impl("_scaled_dot_product_cudnn_attention", pretended::cudnn);
  library.impl("_scaled_dot_product_cudnn_attention_backward", pretended::cudnn_backward);
  library.impl("_scaled_dot_product_efficient_attention", pretended::efficient);
  library.impl("_scaled_dot_product_efficient_attention_backward", pretended::efficient_backward);
}

// Addresses and stream identifiers are integers there. A caller that may wait drops the GIL.
PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  pretended::Entered::check();
  using pretended::Arena, pretended::Registered, pretended::Streams;
  module.attr("ARENA_BYTES") = pretended::kArenaBytes;
  module.def("device_base", [] { return reinterpret_cast<int64_t>(Arena::get().device_base()); });
  module.def("distance", [] { return Arena::get().distance(); });
  module.def("allocated", [] { return Arena::get().allocated(); });
  module.def("peak", [] { return Arena::get().peak(); });
  module.def("num_allocations", [] { return Arena::get().num_allocations(); });
  module.def("restart_peak", [] { Arena::get().restart_peak(); });
  module.def("limit", [](size_t bytes) { Arena::get().limit(bytes); });
  module.def("register_host", [](int64_t begin, size_t bytes) {
    return bytes > 0 && Registered::get().add(reinterpret_cast<void*>(begin), bytes);
  });
  module.def("unregister_host", [](int64_t begin) {
    return Registered::get().remove(reinterpret_cast<void*>(begin));
  });
  module.def("is_registered",
             [](int64_t at) { return Registered::get().holds(reinterpret_cast<void*>(at)); });
  module.def("current_stream", [] { return Streams::current(); });
  module.def("set_current_stream", [](c10::StreamId id) { Streams::current() = id; });
  module.def("active", [] { return Arena::get().active(); });
  module.def("active_peak", [] { return Arena::get().active_peak(); });
  module.def("reserved", [] { return Arena::get().reserved(); });
  module.def("reserved_peak", [] { return Arena::get().reserved_peak(); });
  module.def("num_retries", [] { return Arena::get().num_retries(); });
  module.def("clear_workspaces", [] { pretended::Workspaces::get().clear(); });
  module.def("num_failures", [] { return Arena::get().num_failures(); });
  module.def("empty_cache", [] { Arena::get().empty_cache(); },
             py::call_guard<py::gil_scoped_release>());
  module.def("num_launches", [] { return pretended::num_launches.load(); });
  module.def("num_waits", [] { return pretended::num_waits.load(); });
  module.def("set_delay", [](double most_s) { Streams::get().delay_s = most_s; });
  module.def("set_launch_delay", [](double most_s) { Streams::get().launch_delay_s = most_s; });
  // Work of Python's on the current stream: the kernels that stand for Triton's.
  module.def("launch", [](py::object work) {
    auto held = std::shared_ptr<py::object>(new py::object(std::move(work)), [](py::object* last) {
      const py::gil_scoped_acquire gil;
      delete last;
    });
    pretended::push_launch([held = std::move(held)] {
      const py::gil_scoped_acquire gil;
      (*held)();
    });
  });
  module.def("set_device", [] { pretended::Entered::set_device(); });
  module.def("failed", [] { return pretended::Failure::get().any(); });
  module.def("random_state", [] { return pretended::Chance::get().state(); });
  module.def("set_random_state", [](const at::Tensor& state) {
    pretended::Chance::get().set_state(state);
  });
  module.def("seed", [](int64_t seed) { pretended::Chance::get().seed(seed); });
  module.def("sleep", [](double seconds) {
    pretended::current_stream().push(
        [seconds] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  });
}
