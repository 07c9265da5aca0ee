// A histogram of scores, for the area under the ROC curve.
#pragma once
#include <cstddef>

namespace karvan {

// Counts samples in bins that are equally wide as logits, from -limit to limit; beyond them lie the outermost. Two more
// bins take scores that are NaN, and scores or labels that are no probabilities. counts: (3, bins + 2), sums of the
// weights of positives, of negatives, and the number of samples in the last two bins. weights may be null, for ones.
void count_scores(const double* scores, const double* labels, const double* weights, size_t samples, double limit,
                  size_t bins, double* counts);

}  // namespace karvan
