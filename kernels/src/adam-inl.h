// Adam (Kingma & Ba, 2015) and AdamW (Loshchilov & Hutter, 2019): numbers, constants and formula.
//
// Included by kernels-inl.h, once per instruction set, and so is every optimizer's header. The
// struct in it is the whole optimizer. The loops around the formula are exact-inl.h and lean-inl.h.
//
// The formula has two stages, because lean states use them at different times. UpdateMoments
// changes the moments and passes one more vector on to UpdateWeight. It does not change NaNs. The
// order of operations is the contract of stronghold.h.

struct Adam {
  static constexpr int kMoments = 2;
  static constexpr Coded kCoded[] = {Coded::kSigned, Coded::kRoot};
  static constexpr int kVariants = 2;  // 0: an L2 term in the gradient, 1: decoupled weight decay

  struct Number {
    enum { kLr, kBeta1, kBeta2, kEps, kWeightDecay };
  };
  struct Flag {
    enum { kDecoupled = 1, kBiasCorrection = 2 };
  };
  struct Constant {
    enum {
      kGradScale,
      kWeightDecay,
      kDecayFactor,
      kBeta1,
      kOneMinusBeta1,
      kBeta2,
      kOneMinusBeta2,
      kInvSqrtBiasCorrection2,
      kEps,
      kNegStepSize,
      kCount
    };
  };

  // The reason to refuse a segment's numbers, or nullptr. NaN fails every condition.
  static const char* Wrong(const sh_segment& s) {
    const double* number = s.number;
    const auto is_decay = [](double beta) { return beta >= 0.0 && beta < 1.0; };
    if (!is_decay(number[Number::kBeta1])) return "beta1 must be in [0, 1)";
    if (!is_decay(number[Number::kBeta2])) return "beta2 must be in [0, 1)";
    if (!(number[Number::kEps] >= 0.0)) return "eps must be >= 0";
    if (!std::isfinite(number[Number::kLr])) return "lr must be finite";
    if (!std::isfinite(number[Number::kWeightDecay])) return "weight_decay must be finite";
    if ((s.flags & Flag::kBiasCorrection) != 0 && s.step < 1) return "step must be >= 1";
    return nullptr;
  }

  // Without weight decay the L2 form is the decoupled one with the factor 1.
  static int Variant(const sh_segment& s) {
    const bool decoupled = (s.flags & Flag::kDecoupled) != 0;
    return decoupled || s.number[Number::kWeightDecay] == 0.0 ? 1 : 0;
  }

  // Every constant is computed in double and rounded once.
  static void ConstantsOf(const sh_segment& s, float* constant) {
    const double lr = s.number[Number::kLr];
    const double beta1 = s.number[Number::kBeta1];
    const double beta2 = s.number[Number::kBeta2];
    const double weight_decay = s.number[Number::kWeightDecay];
    double correction1 = 1.0, correction2 = 1.0;
    if ((s.flags & Flag::kBiasCorrection) != 0) {
      // pow of the step, not a running product: resuming at any step gives the same constants.
      correction1 = 1.0 - std::pow(beta1, static_cast<double>(s.step));
      correction2 = 1.0 - std::pow(beta2, static_cast<double>(s.step));
    }
    const auto rounded = [](double x) { return static_cast<float>(x); };
    constant[Constant::kGradScale] = rounded(s.grad_scale);
    constant[Constant::kWeightDecay] = rounded(weight_decay);
    constant[Constant::kDecayFactor] = rounded(1.0 - lr * weight_decay);
    constant[Constant::kBeta1] = rounded(beta1);
    constant[Constant::kOneMinusBeta1] = rounded(1.0 - beta1);
    constant[Constant::kBeta2] = rounded(beta2);
    constant[Constant::kOneMinusBeta2] = rounded(1.0 - beta2);
    constant[Constant::kInvSqrtBiasCorrection2] = rounded(1.0 / std::sqrt(correction2));
    constant[Constant::kEps] = rounded(s.number[Number::kEps]);
    constant[Constant::kNegStepSize] = rounded(-lr / correction1);
  }

  struct Vectors {
    F grad_scale, weight_decay, decay_factor, beta1, one_minus_beta1, beta2, one_minus_beta2,
        inv_sqrt_bias_correction2, eps, neg_step_size;

    SH_INLINE explicit Vectors(const float* constant)
        : grad_scale(Set(constant[Constant::kGradScale])),
          weight_decay(Set(constant[Constant::kWeightDecay])),
          decay_factor(Set(constant[Constant::kDecayFactor])),
          beta1(Set(constant[Constant::kBeta1])),
          one_minus_beta1(Set(constant[Constant::kOneMinusBeta1])),
          beta2(Set(constant[Constant::kBeta2])),
          one_minus_beta2(Set(constant[Constant::kOneMinusBeta2])),
          inv_sqrt_bias_correction2(Set(constant[Constant::kInvSqrtBiasCorrection2])),
          eps(Set(constant[Constant::kEps])),
          neg_step_size(Set(constant[Constant::kNegStepSize])) {}
  };

  // True if UpdateMoments reads p.
  template <int kVariant>
  static constexpr bool kMomentsReadWeight = kVariant == 0;

  // Passes sqrt(v) on, which lean states encode.
  template <int kVariant>
  SH_INLINE static F UpdateMoments(const Vectors& c, F grad, F p, F* moment) {
    F& m = moment[0];
    F& v = moment[1];
    F g = Mul(grad, c.grad_scale);
    if (kVariant == 0) g = Fma(c.weight_decay, p, g);
    m = Fma(c.beta1, m, Mul(c.one_minus_beta1, g));
    v = Fma(c.beta2, v, Mul(Mul(c.one_minus_beta2, g), g));
    return Sqrt(v);
  }

  template <int kVariant>
  SH_INLINE static F UpdateWeight(const Vectors& c, F p, const F* moment, F root) {
    if (kVariant == 1) p = Mul(p, c.decay_factor);
    const F d = Fma(root, c.inv_sqrt_bias_correction2, c.eps);
    return Fma(c.neg_step_size, Div(moment[0], d), p);
  }
};
