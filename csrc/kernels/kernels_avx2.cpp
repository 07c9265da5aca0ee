#define KARVAN_ISA avx2
#include "kernels/kernels.inc"
