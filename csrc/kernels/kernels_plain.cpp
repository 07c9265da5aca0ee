#define KARVAN_ISA plain
#ifdef __x86_64__
#define KARVAN_SMALL  // for processors without AVX2: no code of their own for common cases, which takes long to compile
#endif
#include "kernels/kernels.inc"
