/* The layers with weights in float32. */

#include "cpu_decoder.h"

#ifdef BUILT

typedef float Weight, Input;
typedef Floats Factors;

INLINE Floats read(const Weight *from) { return load(from); }
INLINE void write(Input *to, Floats x) { store(to, x); }
INLINE Factors weights_at(const Weight *panel, int part) { return load(panel); }
INLINE Factors inputs_at(const Input *x) { return all(*x); }
INLINE Floats add_products(Floats sum, Factors weights, Factors inputs) { return multiply_add(weights, inputs, sum); }

#define STEP 1
#define PARTS 1
#define RUN decoder_run_f32
#define SCRATCH decoder_scratch_f32

#include "cpu_layers.h"

#endif
