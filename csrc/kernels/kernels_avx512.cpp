#define KARVAN_ISA avx512
#include "kernels/kernels.inc"
