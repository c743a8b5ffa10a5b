/* stronghold's kernels: Adam, gradient accumulation and norms on the CPU. A plain C ABI.
 *
 * Every function that can fail returns a status; sh_last_error() has the words. Nothing is thrown,
 * printed or kept in globals. Memory belongs to the caller, at any alignment; arrays that are
 * written must not overlap any other array of the same call.
 *
 * [Note: same bits] The result of every kernel depends on its arguments alone: not on the
 * instruction set, the number of threads, or the caller's floating-point mode. A NaN is always
 * written as the one quiet NaN 0x7FC00000 (0x7FC0 in bf16, 0x7E00 in fp16), because hardware
 * differs in which NaN it hands on. Denormals are kept.
 */
#ifndef STRONGHOLD_H_
#define STRONGHOLD_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SH_ABI_VERSION 2

#if defined(__GNUC__)
#define SH_API __attribute__((visibility("default")))
#else
#define SH_API
#endif

typedef enum {
  SH_F32 = 0,
  SH_BF16 = 1,
  SH_F16 = 2,
  SH_BF16_LEAN = 3 /* only as a weight's: bf16, with lean states */
} sh_dtype;

typedef enum {
  SH_OK = 0,
  SH_INVALID = 1, /* an argument breaks the contract; nothing was read or written */
  SH_SYSTEM = 2   /* the system refused memory, a thread, an affinity mask or an I/O request */
} sh_status;

/* What the calling thread's last failed call says, in UTF-8. Valid until its next failure. */
SH_API const char* sh_last_error(void);

/* The errno of that failure; 0 when it had none. */
SH_API int32_t sh_last_errno(void);

/* SH_ABI_VERSION of the library, and the sizes of the structures that it was compiled with. */
SH_API int32_t sh_abi_version(void);
SH_API int64_t sh_adam_segment_bytes(void);

/* ---- Instruction sets ------------------------------------------------------------------------ */

/* Names in falling priority, of those that this CPU can run: "avx512", "avx2", "neon", "scalar".
 * NULL past the last one. */
SH_API const char* sh_isa_at(int32_t index);

/* ---- Threads --------------------------------------------------------------------------------- */

typedef struct sh_pool sh_pool;

/* A pool of `num_threads` >= 1 threads INCLUDING the one that calls a kernel: num_threads - 1
 * threads are started, and sleep between calls. They start in the first call that has work for
 * them no sooner than the caller itself starts working, so small calls never wait for them.
 *
 * With num_cores > 0 all of them, and the calling thread for as long as a call lasts, run on the
 * listed cores only. `isa` is a name that sh_isa_at() gives; NULL takes the environment variable
 * STRONGHOLD_ISA, and where that is unset or empty the first name.
 *
 * Any number of pools may exist. Calls on one pool from several threads take turns. A pool does
 * not survive fork(): in the child every call on it fails, except sh_pool_destroy. */
SH_API int32_t sh_pool_create(int32_t num_threads, const int32_t* cores, int32_t num_cores,
                              const char* isa, sh_pool** out);

/* Joins the threads. Waits for a running call; no call may start later. NULL is allowed. */
SH_API void sh_pool_destroy(sh_pool* pool);

SH_API const char* sh_pool_isa(const sh_pool* pool);

/* ---- Adam ------------------------------------------------------------------------------------ */

/* One array of parameters. `weight` and `low` together are the fp32 master:
 *   SH_F32   weight float     low unused, may be NULL
 *   SH_BF16  weight uint16    low int16: bits(master) = (weight << 16) + low. The weight is the
 *                             master rounded to nearest, ties away from zero; no bit is lost.
 *   SH_F16   weight fp16      low float, the master; the weight is rounded to nearest even.
 *   SH_BF16_LEAN  weight uint16  low int8: bits(master) = (weight << 16) + (low << 8). See below.
 * A weight that somebody else wrote before the call counts: with SH_F16 a weight that is not its
 * master's rounding becomes the master; with bf16 the old remainder, at most half a unit in the
 * weight's last place, stays, unless it would change the sign: of a zero that was written.
 * `step` counts from 1: the number of this update, used when bias_correction != 0. */
typedef struct {
  void* weight;
  void* low;
  void* exp_avg;    /* float; lean: int8 */
  void* exp_avg_sq; /* float; lean: uint8 */
  const void* grad;
  int64_t numel;
  double lr;
  double beta1;
  double beta2;
  double eps;
  double weight_decay;
  double grad_scale;
  int64_t step;
  int32_t adamw;           /* 1: decoupled weight decay; 0: L2 term in the gradient */
  int32_t bias_correction; /* 0: m and v are used as they are */
  float* exp_avg_scale;    /* lean alone, else unused: one per group */
  float* exp_avg_sq_scale;
} sh_adam_segment;

/* One step of Adam (Kingma & Ba, 2015) or AdamW (Loshchilov & Hutter, 2019) on every segment, in
 * place. Constants are computed in double and rounded once; then, in fp32, p being the master:
 *
 *   g = grad * grad_scale
 *   adamw: p = p * (1 - lr * weight_decay)       otherwise: g = fma(weight_decay, p, g)
 *   m = fma(beta1, m, (1 - beta1) * g)
 *   v = fma(beta2, v, ((1 - beta2) * g) * g)
 *   d = fma(sqrt(v), 1 / sqrt(1 - beta2^step), eps)
 *   p = fma(-lr / (1 - beta1^step), m / d, p)
 *
 * With weight_decay == 0 both forms are one. All segments share the two dtypes; work is split over
 * the threads across all of them.
 *
 * [Note: lean states] With SH_BF16_LEAN the same step is between a decoding and an encoding, and
 * 5.125 bytes per parameter are kept. Elements [64 k, 64 k + 64) of a segment are group k, with
 * element k of the scales; a segment that is a part of a parameter begins at a group of it. The
 * last group may be short; no array is touched past its end. All zeros are a fresh state.
 *
 *   compress(x): bits(x) / 2 + 0x1FC00000, as a float; expand(q): its inverse, 0 of 0
 *   decoded:  m = sign(q) * expand(|q|) * scale         v = (expand(q) * scale)^2
 *   encoded, with A the largest |m|, or sqrt(v), of the group:
 *     scale = max(A * (1 / 16128), 2^-126)              scale = max(A * (1 / 65024), 2^-126)
 *     q = sign(m) * round(compress(|m| * (1 / scale)))  q = max(round(compress(sqrt(v) * ...)), 1)
 *   p is rounded to its upper 24 bits, ties away from zero.
 *
 * The step's own update uses m and v before they are encoded. Where A is not finite, the scale
 * becomes NaN and the codes 0: the group's other weights are updated in this step, and become NaN
 * in the next. stronghold/states.py has the reasons and the errors. */
SH_API int32_t sh_adam(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                       const sh_adam_segment* segments, int64_t num_segments);

/* How far ahead sh_adam asks for memory on this pool, with these dtypes, in elements: the faster of
 * two distances, found by timing some 500 of its chunks after the first step; 0 until then. It
 * changes no bit. */
SH_API int32_t sh_adam_prefetch(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                                int64_t* elements);

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

/* out[i] = sum of squares of segment i, in double. Finite input never overflows; any NaN or
 * infinity in the input makes the sum non-finite. The tree has one fixed shape: blocks of 65536
 * elements; in a block element j goes to lane j % 32 and the 32 lanes are halved five times;
 * blocks are added in order. */
SH_API int32_t sh_sum_squares(sh_pool* pool, sh_dtype dtype, const sh_array_segment* segments,
                              int64_t num_segments, double* out);

/* ---- The memory's limit ---------------------------------------------------------------------- */

/* Moves the bytes that sh_adam with these arguments moves, and computes nothing: reads every
 * array, and writes weight, low and both moments. With `to` NULL they are written where they were
 * read, unchanged; otherwise to the arrays of `to`, which begin at multiples of 64 bytes, past the
 * caches where the instruction set can. What benchmarks hold sh_adam against; the distance of
 * prefetching is found for each of the two ways as sh_adam finds its own. */
SH_API int32_t sh_adam_traffic(sh_pool* pool, sh_dtype weight_dtype, sh_dtype grad_dtype,
                               const sh_adam_segment* segments, const sh_adam_segment* to,
                               int64_t num_segments);

#ifdef __cplusplus
}
#endif

#endif /* STRONGHOLD_H_ */
