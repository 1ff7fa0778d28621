// Adam's moments, included by scan_body.h; averaging/moments.py is the specification, in this order.

namespace {

using sparsync::Moments;

inline float root_of(float mean, float square, const Moments &given) {
  square *= given.square;
  if (given.averaged) square += given.mean * mean * mean;
  return __builtin_sqrtf(square) + given.eps;
}

void correct(const float *mean, const float *square, float *weights, int64_t n,
             const Moments &given) {
  for (int64_t i = 0; i < n; ++i) {
    const float own = __builtin_sqrtf(square[i] * given.own) + given.eps;
    const float missing = 1.0f / root_of(mean[i], square[i], given) - 1.0f / own;
    weights[i] += given.rate * mean[i] * missing;
  }
}

void follow(float *mean, const float *square, const float *ahead, int64_t n, const Moments &given) {
  for (int64_t i = 0; i < n; ++i)
    mean[i] += given.rate * root_of(mean[i], square[i], given) * ahead[i];
}

}  // namespace
