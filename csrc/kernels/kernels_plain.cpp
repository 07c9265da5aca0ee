#define KARVAN_ISA plain
#include "kernels/kernels.inc"
