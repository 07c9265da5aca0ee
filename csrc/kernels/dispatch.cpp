#include <atomic>
#include <cstring>

#include "kernels/kernels.h"

namespace karvan {

namespace plain { extern const Kernels kKernels; }
#if defined(__x86_64__)
namespace avx2 { extern const Kernels kKernels; }
namespace avx512 { extern const Kernels kKernels; }
#endif

namespace {

struct Available {
  const Kernels* all[4] = {};
  const char* names[4] = {};
  Available() {
    int n = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
      all[n++] = &avx512::kKernels;
    if (__builtin_cpu_supports("avx2")) all[n++] = &avx2::kKernels;
#endif
    all[n++] = &plain::kKernels;
    for (int i = 0; i < n; ++i) names[i] = all[i]->name;
  }
};

const Available& available() {
  static const Available instance;
  return instance;
}

std::atomic<const Kernels*> chosen{nullptr};

}  // namespace

const Kernels& kernels() {
  const Kernels* k = chosen.load(std::memory_order_acquire);
  return k ? *k : *available().all[0];
}

const char* const* kernel_names() { return available().names; }

bool choose_kernels(const char* name) {
  for (const Kernels* k : available().all) {
    if (k && std::strcmp(k->name, name) == 0) {
      chosen.store(k, std::memory_order_release);
      return true;
    }
  }
  return false;
}

}  // namespace karvan
