/* The layers with weights in bfloat16, for processors with AVX512-BF16. Inputs of a product are rounded to bfloat16. */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include "cpu_decoder.h"

#pragma GCC target("avx512bf16")

typedef uint16_t bf16;

#define ELEMENT bf16
#define TOGETHER 2
#define RUN decoder_run_bf16
#define SCRATCH decoder_scratch_bf16

#include "cpu_layers.h"

#endif
