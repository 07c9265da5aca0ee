#include "math/score_counts.h"

#include <algorithm>
#include <cmath>

namespace karvan {

void count_scores(const double* scores, const double* labels, const double* weights, size_t samples, double limit,
                  size_t bins, double* counts) {
  const size_t all = bins + 2;
  const double scale = static_cast<double>(bins) / (2 * limit), middle = static_cast<double>(bins) / 2;
  double *positives = counts, *negatives = counts + all, *wrong = counts + 2 * all;
  for (size_t i = 0; i < samples; ++i) {
    const double score = scores[i], label = labels[i], weight = weights ? weights[i] : 1.0;
    const bool known = score >= 0 && score <= 1 && label >= 0 && label <= 1;
    size_t place = std::isnan(score) ? bins : bins + 1;
    if (known) {
      const double logit = std::log(score / (1 - score));  // an infinity at both ends
      place = static_cast<size_t>(std::clamp(logit * scale + middle, 0.0, static_cast<double>(bins - 1)));
    }
    positives[place] += label * weight;
    negatives[place] += weight - label * weight;
    wrong[place] += !known;
  }
}

}  // namespace karvan
