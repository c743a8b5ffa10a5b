// Lion (Chen et al., 2023): numbers, constants and formula. The weight decay is decoupled, as in
// DeepSpeed's CPULion. adam-inl.h explains the parts of an optimizer's header.

struct Lion {
  static constexpr int kMoments = 1;
  static constexpr Coded kCoded[] = {Coded::kSigned};
  static constexpr int kVariants = 1;

  struct Number {
    enum { kLr, kBeta1, kBeta2, kWeightDecay };
  };
  struct Constant {
    enum {
      kGradScale,
      kDecayFactor,
      kBeta1,
      kOneMinusBeta1,
      kBeta2,
      kOneMinusBeta2,
      kNegLr,
      kCount
    };
  };

  static const char* Wrong(const sh_segment& s) {
    const double* number = s.number;
    const auto is_decay = [](double beta) { return beta >= 0.0 && beta < 1.0; };
    if (!is_decay(number[Number::kBeta1])) return "beta1 must be in [0, 1)";
    if (!is_decay(number[Number::kBeta2])) return "beta2 must be in [0, 1)";
    if (!std::isfinite(number[Number::kLr])) return "lr must be finite";
    if (!std::isfinite(number[Number::kWeightDecay])) return "weight_decay must be finite";
    return nullptr;
  }

  static int Variant(const sh_segment&) { return 0; }

  static void ConstantsOf(const sh_segment& s, float* constant) {
    const double lr = s.number[Number::kLr];
    const double beta1 = s.number[Number::kBeta1];
    const double beta2 = s.number[Number::kBeta2];
    const auto rounded = [](double x) { return static_cast<float>(x); };
    constant[Constant::kGradScale] = rounded(s.grad_scale);
    constant[Constant::kDecayFactor] = rounded(1.0 - lr * s.number[Number::kWeightDecay]);
    constant[Constant::kBeta1] = rounded(beta1);
    constant[Constant::kOneMinusBeta1] = rounded(1.0 - beta1);
    constant[Constant::kBeta2] = rounded(beta2);
    constant[Constant::kOneMinusBeta2] = rounded(1.0 - beta2);
    constant[Constant::kNegLr] = rounded(-lr);
  }

  struct Vectors {
    F grad_scale, decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2, neg_lr;

    SH_INLINE explicit Vectors(const float* constant)
        : grad_scale(Set(constant[Constant::kGradScale])),
          decay_factor(Set(constant[Constant::kDecayFactor])),
          beta1(Set(constant[Constant::kBeta1])),
          one_minus_beta1(Set(constant[Constant::kOneMinusBeta1])),
          beta2(Set(constant[Constant::kBeta2])),
          one_minus_beta2(Set(constant[Constant::kOneMinusBeta2])),
          neg_lr(Set(constant[Constant::kNegLr])) {}
  };

  template <int kVariant>
  static constexpr bool kMomentsReadWeight = false;

  // 1 or -1; 0 for either zero; NaN for NaN.
  SH_INLINE static F Sign(F x) {
    const F zero = Set(0.0f);
    const F sign = SelectEqual(x, zero, zero, CopySign(Set(1.0f), x));
    return SelectEqual(x, x, sign, x);
  }

  // Passes u on. Its sign is the direction of the step.
  template <int kVariant>
  SH_INLINE static F UpdateMoments(const Vectors& c, F grad, F, F* moment) {
    F& m = moment[0];
    const F g = Mul(grad, c.grad_scale);
    const F u = Fma(c.beta1, m, Mul(c.one_minus_beta1, g));
    m = Fma(c.beta2, m, Mul(c.one_minus_beta2, g));
    return u;
  }

  template <int kVariant>
  SH_INLINE static F UpdateWeight(const Vectors& c, F p, const F*, F u) {
    return Fma(c.neg_lr, Sign(u), Mul(p, c.decay_factor));
  }
};
