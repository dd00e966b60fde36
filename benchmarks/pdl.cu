// The two halves of the test for programmatic dependent launch: a predecessor that lets its dependents start long before it
// writes, and a reader that does not wait for it. What the reader sees proves that the test can catch a missing wait.

using u64 = unsigned long long;

__device__ __forceinline__ u64 nanoseconds_now() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// One CTA: triggers its dependents, idles, then copies count 16-byte words.
extern "C" __global__ void __launch_bounds__(256) late_copy(uint4* to, const uint4* from, unsigned count, unsigned delay_nanoseconds) {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  const u64 start = nanoseconds_now();
  while (nanoseconds_now() - start < delay_nanoseconds) {
  }
  __syncthreads();
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// One CTA: copies at once, without griddepcontrol.wait.
extern "C" __global__ void __launch_bounds__(256) early_copy(uint4* to, const uint4* from, unsigned count) {
  for (unsigned i = threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}
