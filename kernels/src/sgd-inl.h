// SGD with and without momentum, as torch.optim.SGD with dampening 0: numbers, constants and
// formulas. adam-inl.h explains the parts of an optimizer's header.

struct SgdMomentum {
  static constexpr int kMoments = 1;
  static constexpr Coded kCoded[] = {Coded::kSigned};
  static constexpr int kVariants = 2;  // 0: the step goes along the buffer; 1: Nesterov's

  struct Number {
    enum { kLr, kMomentum, kWeightDecay };
  };
  struct Flag {
    enum { kNesterov = 1 };
  };
  struct Constant {
    enum { kGradScale, kWeightDecay, kNegLr, kMomentum, kCount };
  };

  static const char* Wrong(const sh_segment& s) {
    const double momentum = s.number[Number::kMomentum];
    if (!std::isfinite(s.number[Number::kLr])) return "lr must be finite";
    if (!(momentum >= 0.0) || std::isinf(momentum)) return "momentum must be >= 0 and finite";
    if (!std::isfinite(s.number[Number::kWeightDecay])) return "weight_decay must be finite";
    return nullptr;
  }

  static int Variant(const sh_segment& s) { return (s.flags & Flag::kNesterov) != 0 ? 1 : 0; }

  static void ConstantsOf(const sh_segment& s, float* constant) {
    constant[Constant::kGradScale] = static_cast<float>(s.grad_scale);
    constant[Constant::kWeightDecay] = static_cast<float>(s.number[Number::kWeightDecay]);
    constant[Constant::kNegLr] = static_cast<float>(-s.number[Number::kLr]);
    constant[Constant::kMomentum] = static_cast<float>(s.number[Number::kMomentum]);
  }

  struct Vectors {
    F grad_scale, weight_decay, neg_lr, momentum;

    SH_INLINE explicit Vectors(const float* constant)
        : grad_scale(Set(constant[Constant::kGradScale])),
          weight_decay(Set(constant[Constant::kWeightDecay])),
          neg_lr(Set(constant[Constant::kNegLr])),
          momentum(Set(constant[Constant::kMomentum])) {}
  };

  template <int kVariant>
  static constexpr bool kMomentsReadWeight = true;

  // Passes the direction of the step on.
  template <int kVariant>
  SH_INLINE static F UpdateMoments(const Vectors& c, F grad, F p, F* moment) {
    F& buffer = moment[0];
    const F g = Fma(c.weight_decay, p, Mul(grad, c.grad_scale));
    buffer = Fma(c.momentum, buffer, g);
    return kVariant == 1 ? Fma(c.momentum, buffer, g) : buffer;
  }

  template <int kVariant>
  SH_INLINE static F UpdateWeight(const Vectors& c, F p, const F*, F direction) {
    return Fma(c.neg_lr, direction, p);
  }
};

struct Sgd {
  static constexpr int kMoments = 0;
  static constexpr Coded kCoded[1] = {};  // no moment is coded; C++ has no empty array
  static constexpr int kVariants = 1;

  struct Number {
    enum { kLr, kMomentum, kWeightDecay };
  };
  struct Constant {
    enum { kGradScale, kWeightDecay, kNegLr, kCount };
  };

  static const char* Wrong(const sh_segment& s) {
    if (!std::isfinite(s.number[Number::kLr])) return "lr must be finite";
    if (s.number[Number::kMomentum] != 0.0) return "momentum must be 0 without a momentum buffer";
    if (!std::isfinite(s.number[Number::kWeightDecay])) return "weight_decay must be finite";
    return nullptr;
  }

  static int Variant(const sh_segment&) { return 0; }

  static void ConstantsOf(const sh_segment& s, float* constant) {
    constant[Constant::kGradScale] = static_cast<float>(s.grad_scale);
    constant[Constant::kWeightDecay] = static_cast<float>(s.number[Number::kWeightDecay]);
    constant[Constant::kNegLr] = static_cast<float>(-s.number[Number::kLr]);
  }

  struct Vectors {
    F grad_scale, weight_decay, neg_lr;

    SH_INLINE explicit Vectors(const float* constant)
        : grad_scale(Set(constant[Constant::kGradScale])),
          weight_decay(Set(constant[Constant::kWeightDecay])),
          neg_lr(Set(constant[Constant::kNegLr])) {}
  };

  template <int kVariant>
  static constexpr bool kMomentsReadWeight = true;

  // Passes the direction of the step on: the gradient with its weight decay.
  template <int kVariant>
  SH_INLINE static F UpdateMoments(const Vectors& c, F grad, F p, F*) {
    return Fma(c.weight_decay, p, Mul(grad, c.grad_scale));
  }

  template <int kVariant>
  SH_INLINE static F UpdateWeight(const Vectors& c, F p, const F*, F direction) {
    return Fma(c.neg_lr, direction, p);
  }
};
