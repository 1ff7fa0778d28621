// Adam's moments, included by scan_body.h; updates/gradient_noise.py is the specification, order included.

namespace {

using sparsync::Moments;

void lengthen(const float *first, const float *second, float *weights, int64_t n,
              const Moments &given) {
  for (int64_t i = 0; i < n; ++i) {
    const float own = 1.0f / (__builtin_sqrtf(second[i] * given.own) + given.eps);
    const float lengthened = 1.0f / (__builtin_sqrtf(second[i] * given.lengthened) + given.eps);
    weights[i] += (lengthened - own) * (first[i] * given.rate);
  }
}

}  // namespace
