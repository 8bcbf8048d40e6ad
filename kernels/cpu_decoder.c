/* All layers of a Llama-like decoder in one call. See kernels/cpu_decoder.py.
 *
 * Weights are bfloat16 or float32, everything else is float32 (but see BF16_DOT). A row's result depends on its own
 * sequence alone: each sum is taken in one order, whatever else the pass holds. So passes over one row and over many
 * give the same logits, bit for bit, on any number of threads.
 */

#include "cpu_decoder.h"

#ifdef BUILT

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#define MOST_THREADS 256

/* ------------------------------------------------------------------------------------------------------- threads */

typedef struct {
    pthread_mutex_t pass_lock, lock; /* one pass at a time; and for `wake` */
    pthread_cond_t wake;
    atomic_int generation, working, arrived, phase;
    int started, threads;
    const Model *model;
    const Pass *pass;
} Pool;

#define NEW_POOL \
    {.pass_lock = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER}
static Pool pool = NEW_POOL;

#define SPINS 4000 /* some 0.1 ms */

void decoder_barrier(int threads) {
    if (threads == 1) return;
    int phase = atomic_load(&pool.phase);
    if (atomic_fetch_add(&pool.arrived, 1) == threads - 1) {
        atomic_store(&pool.arrived, 0);
        atomic_fetch_add(&pool.phase, 1);
        return;
    }
    for (int spins = 0; atomic_load(&pool.phase) == phase; spins++) {
        if (spins < SPINS) wait_a_little();
        else sched_yield(); /* another process has the other thread's core */
    }
}

static void run(const Model *model, const Pass *pass, int thread) {
#ifdef AVX512
    if (model->weights == BF16_DOT) {
        decoder_run_bf16_dot(model, pass, thread);
        return;
    }
#endif
    if (model->weights == BF16) decoder_run_bf16(model, pass, thread);
    else decoder_run_f32(model, pass, thread);
}

/* `argument`: the number of the thread, and the generation at its start. */
static void *work(void *argument) {
    int thread = (int)((intptr_t)argument % MOST_THREADS), seen = (int)((intptr_t)argument / MOST_THREADS);
    for (;;) {
        for (int spins = 0; spins < SPINS && atomic_load(&pool.generation) == seen; spins++) wait_a_little();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.generation) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
        seen = atomic_load(&pool.generation);
        const Model *model = pool.model;
        const Pass *pass = pool.pass;
        int takes_part = thread < pool.threads;
        pthread_mutex_unlock(&pool.lock);
        if (takes_part) {
            run(model, pass, thread);
            atomic_fetch_sub(&pool.working, 1);
        }
    }
    return NULL;
}

/* A forked process has none of the threads. */
static void forget_threads(void) {
    pool = (Pool)NEW_POOL;
}

/* Starts threads up to `wanted`, this one included; returns how many there are. */
static int start_threads(int wanted) {
    if (!pool.started) {
        pool.started = 1;
        pthread_atfork(NULL, NULL, forget_threads);
    }
    for (; pool.started < wanted; pool.started++) {
        pthread_t thread;
        intptr_t argument = (intptr_t)atomic_load(&pool.generation) * MOST_THREADS + pool.started;
        if (pthread_create(&thread, NULL, work, (void *)argument)) break;
        pthread_detach(thread);
    }
    return pool.started < wanted ? pool.started : wanted;
}

/* ------------------------------------------------------------------------------------------------------ interface */

/* 0 if this processor cannot run it; else how many kinds of weights it supports: F32 and BF16, or BF16_DOT too. */
int decoder_supported(void) {
#ifdef AVX512
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 0;
    return __builtin_cpu_supports("avx512bf16") ? 3 : 2;
#elif defined(AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? 2 : 0;
#else
    return 2;
#endif
}

/* Sizes of panels and structures, which Python's must have: an old library stays behind when the sources change. */
void decoder_sizes(int32_t *sizes) {
    sizes[0] = PANEL, sizes[1] = sizeof(Layer), sizes[2] = sizeof(Model), sizes[3] = sizeof(Pass);
}

/* Bytes of scratch memory that a pass needs. */
int64_t decoder_scratch(const Model *model, const Pass *pass) {
#ifdef AVX512
    if (model->weights == BF16_DOT) return decoder_scratch_bf16_dot(model, pass);
#endif
    return model->weights == BF16 ? decoder_scratch_bf16(model, pass) : decoder_scratch_f32(model, pass);
}

void decoder_run(const Model *model, Pass *pass) {
    if (pass->threads > MOST_THREADS) pass->threads = MOST_THREADS;
    if (pass->threads == 1) {
        run(model, pass, 0);
        return;
    }
    pthread_mutex_lock(&pool.pass_lock);
    pass->threads = start_threads(pass->threads);
    pthread_mutex_lock(&pool.lock);
    pool.model = model, pool.pass = pass, pool.threads = pass->threads;
    atomic_store(&pool.working, pass->threads - 1);
    atomic_fetch_add(&pool.generation, 1);
    pthread_cond_broadcast(&pool.wake);
    pthread_mutex_unlock(&pool.lock);
    run(model, pass, 0);
    for (int spins = 0; atomic_load(&pool.working); spins++) {
        if (spins < SPINS) wait_a_little();
        else sched_yield();
    }
    pthread_mutex_unlock(&pool.pass_lock);
}

#else

int decoder_supported(void) { return 0; }

#endif
