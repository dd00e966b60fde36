// The cold-stream floor: kernels that read a list of chunks once and do nothing else. The best of them is the shortest time
// in which this GPU can bring those bytes from memory to its SMs, whatever is done with them.
//
// No header is included, so that NVRTC compiles this file without a toolkit (nvcc takes it too).
// With check != 0 a kernel adds the 32-bit sum of all the words it read to *sum: proof that it read each byte exactly once.

using u64 = unsigned long long;

struct __align__(16) Chunk {
  const uint4* data;  // 16-byte aligned
  u64 bytes;          // a multiple of 16; at most STAGE_BYTES for bulk_ring
};

constexpr unsigned STAGE_BYTES = 16384;
constexpr unsigned MAX_STAGES = 12;
constexpr unsigned UNLIKELY = 0x9E3779B9u;  // keeps the loads alive without a store: a sum that practically never comes up

__device__ __forceinline__ u64 cache_policy(unsigned evict_first) {
  u64 first, normal;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
  asm volatile("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
  return evict_first ? first : normal;
}

__device__ __forceinline__ uint4 load(const uint4* from, u64 policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "l"(policy));
  return v;
}

// ---- Plain loads: CTA b reads chunks b, b + grid, ... with UNROLL 16-byte loads in flight per thread. ----

template <unsigned THREADS, unsigned UNROLL>
__device__ __forceinline__ unsigned read_chunk(Chunk chunk, u64 policy) {
  unsigned sum = 0;
  const u64 count = chunk.bytes / 16;
  u64 i = threadIdx.x;
#pragma unroll 1
  for (; i + (UNROLL - 1) * THREADS < count; i += UNROLL * THREADS) {
    uint4 v[UNROLL];
#pragma unroll
    for (unsigned k = 0; k < UNROLL; k++) v[k] = load(chunk.data + i + k * THREADS, policy);
#pragma unroll
    for (unsigned k = 0; k < UNROLL; k++) sum += v[k].x + v[k].y + v[k].z + v[k].w;
  }
#pragma unroll 1
  for (; i < count; i += THREADS) {
    const uint4 v = load(chunk.data + i, policy);
    sum += v.x + v.y + v.z + v.w;
  }
  return sum;
}

template <unsigned THREADS, unsigned UNROLL>
__device__ __forceinline__ void plain(const Chunk* chunks, unsigned count, unsigned evict_first, unsigned check, unsigned* sum) {
  unsigned i = blockIdx.x, mine = 0;
  Chunk next = chunks[i];  // one chunk ahead: its address is known when its turn comes. Precondition: grid <= count
  const u64 policy = cache_policy(evict_first);
  while (i < count) {
    const Chunk now = next;
    i += gridDim.x;
    if (i < count) next = chunks[i];
    mine += read_chunk<THREADS, UNROLL>(now, policy);
  }
  if (check || mine == UNLIKELY) atomicAdd(sum, mine);
}

// The second bound is what lets ptxas spend registers on UNROLL loads: without it, it aims at 2048 threads per SM, 32 registers.
#define PLAIN(THREADS, UNROLL)                                                                                      \
  extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) plain_##THREADS##x##UNROLL(                                 \
      const Chunk* chunks, unsigned count, unsigned stages, unsigned evict_first, unsigned check, unsigned* sum) { \
    plain<THREADS, UNROLL>(chunks, count, evict_first, check, sum);                                                 \
  }
PLAIN(256, 8)
PLAIN(512, 4)
PLAIN(512, 8)

// ---- TMA bulk copies: a ring of stages per CTA; thread 0 issues, waits and refills. ----

__device__ __forceinline__ unsigned shared_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done)
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
}

__device__ __forceinline__ void copy(unsigned to, Chunk chunk, unsigned barrier, u64 policy) {
  const unsigned bytes = static_cast<unsigned>(chunk.bytes);
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(chunk.data), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
}

extern "C" __global__ void __launch_bounds__(128) bulk_ring(const Chunk* chunks, unsigned count, unsigned stages, unsigned evict_first,
                                                             unsigned check, unsigned* sum) {
  extern __shared__ __align__(128) char ring[];  // stages * STAGE_BYTES, then this CTA's chunks
  __shared__ __align__(8) u64 full[MAX_STAGES];
  Chunk* list = reinterpret_cast<Chunk*>(ring + stages * STAGE_BYTES);
  const unsigned mine = (count - blockIdx.x + gridDim.x - 1) / gridDim.x;  // Precondition: grid <= count
  if (threadIdx.x == blockDim.x - 1) {  // has the fewest chunks to fetch
    for (unsigned s = 0; s < stages; s++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&full[s])) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  // All addresses at once: one memory latency, not one per copy.
  for (unsigned i = threadIdx.x; i < mine; i += blockDim.x) list[i] = chunks[blockIdx.x + i * gridDim.x];
  __syncthreads();
  if (!check && threadIdx.x) return;

  const u64 policy = cache_policy(evict_first);
  auto issue = [&](unsigned i, unsigned stage) {
    if (threadIdx.x == 0 && i < mine) copy(shared_address(ring + stage * STAGE_BYTES), list[i], shared_address(&full[stage]), policy);
  };
  for (unsigned s = 0; s < stages; s++) issue(s, s);
  unsigned stage = 0, parity = 0, words = 0;
  for (unsigned i = 0; i < mine; i++) {
    wait(shared_address(&full[stage]), parity);
    if (check) {
      const unsigned* read = reinterpret_cast<const unsigned*>(ring + stage * STAGE_BYTES);
      for (unsigned w = threadIdx.x; w < list[i].bytes / 4; w += blockDim.x) words += read[w];
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // these reads before the copy that refills the stage
      __syncthreads();
    }
    issue(i + stages, stage);
    if (++stage == stages) stage = 0, parity ^= 1;
  }
  if (check) atomicAdd(sum, words);
}
