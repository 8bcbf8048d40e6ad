/* The layers with weights in bfloat16 and products in float32. The same weights in float32 give the same bits. */

#include "cpu_decoder.h"

#ifdef BUILT

typedef uint16_t Weight;
typedef float Input;
typedef Floats Factors;

INLINE Floats read(const Weight *from) { return (Floats)(load_halves(from) << 16); }
INLINE void write(Input *to, Floats x) { store(to, x); }

/* The weights of two inputs share 32 bits. */
INLINE Factors weights_at(const Weight *panel, int part) {
    Bits two = load_bits(panel);
    return (Floats)(part ? two & 0xffff0000u : two << 16);
}

INLINE Factors inputs_at(const Input *x) { return all(*x); }
INLINE Floats add_products(Floats sum, Factors weights, Factors inputs) { return multiply_add(weights, inputs, sum); }

#define STEP 2
#define PARTS 2
#define RUN decoder_run_bf16
#define SCRATCH decoder_scratch_bf16

#include "cpu_layers.h"

#endif
