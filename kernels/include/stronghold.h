/* stronghold's kernels: optimizers, gradients' sums and norms, on the CPU. A plain C ABI.
 *
 * Every function that can fail returns a status; sh_last_error() returns the message. No function
 * throws, prints or keeps globals. Memory belongs to the caller, at any alignment. A written array
 * must not overlap any other array of the same call. An update may write where it reads.
 *
 * [Note: same bits]
 * 1. The result of every kernel depends on its arguments alone. It does not depend on the
 *    instruction set, the number of threads, or the caller's floating-point mode.
 * 2. A kernel writes every NaN as the one quiet NaN 0x7FC00000 (0x7FC0 in bf16, 0x7E00 in fp16),
 *    because processors propagate different NaNs.
 * 3. Denormals are kept.
 */
#ifndef STRONGHOLD_H_
#define STRONGHOLD_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SH_ABI_VERSION 9

/* The most that one optimizer has. */
#define SH_MAX_MOMENTS 2
#define SH_MAX_NUMBERS 6
#define SH_MAX_CONSTANTS 12

#if defined(__GNUC__)
#define SH_API __attribute__((visibility("default")))
#else
#define SH_API
#endif

typedef enum {
  SH_F32 = 0,
  SH_BF16 = 1,
  SH_F16 = 2,
  SH_BF16_LEAN = 3 /* a weight's dtype alone: bf16, with lean states */
} sh_dtype;

typedef enum {
  SH_OK = 0,
  SH_INVALID = 1, /* an argument breaks the contract; nothing was read or written */
  SH_SYSTEM = 2   /* the system refused memory, a thread, an affinity mask or an I/O request */
} sh_status;

/* The message of the calling thread's last failed call, in UTF-8. Valid until its next failure. */
SH_API const char* sh_last_error(void);

/* The errno of that failure; 0 if it had none. */
SH_API int32_t sh_last_errno(void);

/* SH_ABI_VERSION of the library, and the sizes of the structures that it was compiled with. */
SH_API int32_t sh_abi_version(void);
SH_API int64_t sh_segment_bytes(void);
SH_API int64_t sh_target_bytes(void);

/* ---- Instruction sets ------------------------------------------------------------------------ */

/* The name of an instruction set that this CPU can run, best first: "avx512", "avx2", "neon",
 * "scalar". NULL past the last one. */
SH_API const char* sh_isa_at(int32_t index);

/* ---- Memory ---------------------------------------------------------------------------------- */

/* Commits the pages of `bytes` bytes from the start of one on. Other threads may read and write them
 * meanwhile: an atomic OR with 0 changes nothing. */
SH_API void sh_touch(void* memory, int64_t bytes);

/* A word that processes share. Who loads a value sees all that was written before it was stored:
 * the store is a release, the load an acquire. */
SH_API void sh_store(int64_t* word, int64_t value);
SH_API int64_t sh_load(const int64_t* word);

/* ---- Threads --------------------------------------------------------------------------------- */

typedef struct sh_pool sh_pool;

/* A pool of `num_threads` >= 1 threads INCLUDING the one that calls a kernel. It starts
 * num_threads - 1 threads, which sleep between calls. The caller starts to work at once, and the
 * threads join it when they wake. So small calls never wait for them.
 *
 * With num_cores > 0 all threads run on the listed cores only, and so does the calling thread
 * during a call. `isa` is a name of sh_isa_at(). NULL: the environment variable STRONGHOLD_ISA, or
 * the first name if that is unset or empty.
 *
 * Any number of pools may exist. Calls on one pool from several threads take turns. A pool does
 * not survive fork(): in the child every call on it fails, except sh_pool_destroy. */
SH_API int32_t sh_pool_create(int32_t num_threads, const int32_t* cores, int32_t num_cores,
                              const char* isa, sh_pool** out);

/* Joins the threads. Waits for a running call. No call may start later. NULL is allowed. */
SH_API void sh_pool_destroy(sh_pool* pool);

SH_API const char* sh_pool_isa(const sh_pool* pool);

/* ---- Optimizers ------------------------------------------------------------------------------ */

/* The names of the optimizers, in any order. NULL past the last one. */
SH_API const char* sh_optimizer_at(int32_t index);

/* The arguments of one step for one array of parameters. `weight` and `low` (the master remainder)
 * together are the fp32 master:
 *   SH_F32   weight float     low unused, may be NULL
 *   SH_BF16  weight uint16    low int16: bits(master) = (weight << 16) + low. The weight is the
 *                             master rounded to nearest, ties away from zero; no bit is lost.
 *   SH_F16   weight fp16      low float, the master; the weight is rounded to nearest even.
 *   SH_BF16_LEAN  weight uint16  low int8: bits(master) = (weight << 16) + (low << 8). See below.
 * The caller may write a weight before the call, and the step follows it. With SH_F16 a weight that
 * is not its master's rounding becomes the master. With bf16 the old remainder stays; it is at most
 * half a unit in the weight's last place. If the caller wrote a zero, a remainder that would change
 * its sign counts as 0.
 *
 * An optimizer uses the first moments, scales and numbers, in the order of its description below.
 * It ignores the others. */
typedef struct {
  void* weight;
  void* low;
  const void* grad;
  int64_t numel;
  void* moment[SH_MAX_MOMENTS];  /* float; lean: int8, or uint8 of a square root */
  float* scale[SH_MAX_MOMENTS];  /* lean alone: one per group of 64 elements */
  double number[SH_MAX_NUMBERS]; /* the hyper-parameters */
  double grad_scale;             /* multiplies the gradient */
  int64_t step;                  /* the number of this update, from 1 */
  int64_t flags;
} sh_segment;

/* The destinations of one segment's step. NULL, or the address in the segment, means in place. Some
 * arrays may be in place and others not. A pointer to an array that the dtype or the optimizer does
 * not have is ignored. */
typedef struct {
  void* weight;
  void* low;
  void* moment[SH_MAX_MOMENTS];
  float* scale[SH_MAX_MOMENTS];
} sh_target;

/* One step of the optimizer on every segment: in place, or to other arrays. All segments share the
 * two dtypes. Work is split over the threads across all of them.
 *
 * [Note: targets]
 * 1. If `targets` is NULL, the whole call is in place. Else it has one target for each segment.
 * 2. The step reads an array that is not in place from the segment's address, and does not change
 *    it there.
 * 3. The step writes all of its target, also if it changes no bit: numel elements, or as many
 *    scales as the segment has groups. It writes nothing before or after them, and reads no target.
 * 4. A caller that swaps the two arrays afterwards must copy into the target what no segment names:
 *    padding, and parameters that have no step.
 * 5. A target overlaps no other array of the call. SH_INVALID if it overlaps an array or a target
 *    of its segment; other segments are not checked.
 * 6. The bits are those of the step in place. The step moves the same bytes, because it writes past
 *    the caches. For that, written arrays must begin at multiples of 64 bytes: weight, low and
 *    moments, also those in place. Otherwise the bits are the same, and the step also reads the
 *    target's lines, which takes longer.
 *
 * Every optimizer has constants: functions of a segment's numbers, computed in double and rounded
 * once to fp32. The formulas below name them by position. Constant 0 is grad_scale. The operations
 * are in fp32 and in the given order; p is the master:
 *
 * "adam": Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019).
 *   moments    m (exp_avg), v (exp_avg_sq, whose square root is coded in lean states)
 *   numbers    lr, beta1, beta2, eps, weight_decay
 *   flags      1: decoupled weight decay; otherwise an L2 term in the gradient
 *              2: bias correction; otherwise m and v are used as they are
 *   constants  1 weight_decay           2 1 - lr * weight_decay    3 beta1    4 1 - beta1
 *              5 beta2    6 1 - beta2   7 1 / sqrt(1 - beta2^step) 8 eps
 *              9 -lr / (1 - beta1^step)
 *   variants   0: the L2 form; 1: AdamW's form, also where weight_decay is 0
 *
 *   g = grad * grad_scale
 *   1: p = p * (1 - lr * weight_decay)       0: g = fma(weight_decay, p, g)
 *   m = fma(beta1, m, (1 - beta1) * g)
 *   v = fma(beta2, v, ((1 - beta2) * g) * g)
 *   d = fma(sqrt(v), 1 / sqrt(1 - beta2^step), eps)
 *   p = fma(-lr / (1 - beta1^step), m / d, p)
 *
 * "lion": Lion (Chen et al., 2023), with decoupled weight decay.
 *   moments    m (exp_avg)
 *   numbers    lr, beta1, beta2, weight_decay
 *   flags      none
 *   constants  1 1 - lr * weight_decay  2 beta1  3 1 - beta1  4 beta2  5 1 - beta2  6 -lr
 *   variants   0
 *
 *   g = grad * grad_scale
 *   u = fma(beta1, m, (1 - beta1) * g)
 *   p = p * (1 - lr * weight_decay)
 *   p = fma(-lr, sign(u), p)                 sign(u) is 1 or -1; 0 for either zero; NaN for NaN
 *   m = fma(beta2, m, (1 - beta2) * g)
 *
 * "sgd_momentum": SGD with momentum and no dampening, as in torch.
 *   moments    b (momentum_buffer)
 *   numbers    lr, momentum, weight_decay
 *   flags      1: Nesterov's momentum
 *   constants  1 weight_decay  2 -lr  3 momentum
 *   variants   0: the plain one; 1: Nesterov's
 *
 *   g = fma(weight_decay, p, grad * grad_scale)
 *   b = fma(momentum, b, g)
 *   1: d = fma(momentum, b, g)               0: d = b
 *   p = fma(-lr, d, p)
 *
 * "sgd": SGD without momentum. Its number `momentum` must be 0; d = g.
 *   moments    none
 *   numbers    lr, momentum, weight_decay
 *   flags      none
 *   constants  1 weight_decay  2 -lr
 *   variants   0
 *
 * [Note: lean states]
 * 1. With SH_BF16_LEAN the step decodes, performs the same operations, and encodes.
 * 2. Elements [64 k, 64 k + 64) of a segment are group k, with element k of the scales. A segment
 *    of a piece of a parameter begins at a group of it. The last group may be short; the step
 *    touches no array past its end.
 * 3. All zeros are a fresh state.
 * 4. A parameter takes 3 bytes, and 1.0625 per moment.
 * 5. Every moment is coded with a sign, as m is here. Adam's v is coded as its square root.
 *
 *
 *   compress(x): bits(x) / 2 + 0x1FC00000, as a float; expand(q): its inverse; expand(0) = 0
 *   decoded:  m = sign(q) * expand(|q|) * scale         v = (expand(q) * scale)^2
 *   encoded, with A the largest |m|, or sqrt(v), of the group:
 *     scale = max(A * (1 / 16128), 2^-126)              scale = max(A * (1 / 65024), 2^-126)
 *     q = sign(m) * round(compress(|m| * (1 / scale)))  q = max(round(compress(sqrt(v) * ...)), 1)
 *   p is rounded to its upper 24 bits, ties away from zero.
 *
 * A step updates the weights with the moments before they are encoded. If A is not finite, the
 * scale becomes NaN and the codes 0. This step still updates the group's other weights; the next
 * step gives NaN for all weights whose update reads the moment. stronghold/optim/states.py has the
 * reasons and the bounds of rounding. */
SH_API int32_t sh_update(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                         sh_dtype grad_dtype, const sh_segment* segments, const sh_target* targets,
                         int64_t num_segments);

/* The distance of sh_update's memory prefetch in place, in elements, on this pool, with this
 * optimizer and these dtypes: the faster of two. Calls with targets have another one. The pool
 * chooses it by timing some 500 chunks of the calls after the first step; before that it is 0. It
 * changes no bit. */
SH_API int32_t sh_update_prefetch(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                                  sh_dtype grad_dtype, int64_t* elements);

/* The constants that sh_update computes from each segment's numbers, grad_scale, step and flags,
 * and the variant of its formula. For an implementation elsewhere. It reads no other field. `out`
 * is [num_segments][SH_MAX_CONSTANTS], with zeros after the optimizer's last constant; `variant` is
 * [num_segments]. SH_INVALID, and nothing is written, for the numbers that sh_update refuses. */
SH_API int32_t sh_update_constants(const char* optimizer, const sh_segment* segments,
                                   int64_t num_segments, float* out, int32_t* variant);

/* ---- Gradients ------------------------------------------------------------------------------- */

typedef struct {
  const void* grad;
  float* acc;
  int64_t numel;
  int64_t add; /* 0: acc = float(grad); 1: acc = acc + float(grad) */
} sh_accumulate_segment;

SH_API int32_t sh_accumulate(sh_pool* pool, sh_dtype grad_dtype,
                             const sh_accumulate_segment* segments, int64_t num_segments);

typedef struct {
  const void* x;
  int64_t numel;
} sh_array_segment;

/* out[i] = sum of squares of segment i, in double. Finite input never overflows. A NaN or infinity
 * in the input makes the sum non-finite. The tree has one fixed shape:
 * 1. A block has 65536 elements. Its element j goes to lane j % 32.
 * 2. The 32 lanes are halved five times.
 * 3. Blocks are added in order. */
SH_API int32_t sh_sum_squares(sh_pool* pool, sh_dtype dtype, const sh_array_segment* segments,
                              int64_t num_segments, double* out);

/* ---- The memory's limit ---------------------------------------------------------------------- */

/* Moves the bytes that sh_update moves with these arrays, and computes nothing. It reads every
 * array, and writes weight, low and the moments. In place it writes them unchanged. With targets
 * that are not the sources it copies them, past the caches if the instruction set can; every
 * target, also of scales, begins at a multiple of 64 bytes. Benchmarks compare sh_update with it.
 * It chooses a distance of prefetching for each of the two cases, as sh_update does. */
SH_API int32_t sh_update_traffic(sh_pool* pool, const char* optimizer, sh_dtype weight_dtype,
                                 sh_dtype grad_dtype, const sh_segment* segments,
                                 const sh_target* targets, int64_t num_segments);

#ifdef __cplusplus
}
#endif

#endif /* STRONGHOLD_H_ */
