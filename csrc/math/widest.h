// Functions for the widest registers: on x86, a copy for AVX2 with fused multiply-adds runs where the processor has them.
#pragma once

namespace karvan {

#if defined(__x86_64__)
#define KARVAN_AVX2 __attribute__((target("avx2,fma")))

inline bool has_avx2() {
  static const bool has = [] {
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  }();
  return has;
}
#else  // the compiler's default has all that there is
#define KARVAN_AVX2

inline bool has_avx2() { return false; }
#endif

template <auto kFunction, class... Args>
KARVAN_AVX2 void run_avx2(Args... args) {
  kFunction(args...);
}

// Calls kFunction(args...), which must be always_inline to be compiled for both.
template <auto kFunction, class... Args>
void run_widest(Args... args) {
  if (has_avx2()) return run_avx2<kFunction>(args...);
  kFunction(args...);
}

}  // namespace karvan
