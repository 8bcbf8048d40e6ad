/* The layers with weights in float32, for processors with AVX512. */

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)

#include "cpu_decoder.h"

#define ELEMENT float
#define TOGETHER 1
#define RUN decoder_run_f32
#define SCRATCH decoder_scratch_f32

#include "cpu_layers.h"

#endif
