//! The effect of the noise on an optimizer: the regret bound for convex losses.

use super::check_positive;
use super::interval::Interval;
use crate::error::{Error, Result};
use serde::Serialize;

/// The setting of a regret bound.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RegretSetting {
    /// Number of steps `n`.
    pub steps: usize,
    /// Dimension `d` of the model.
    pub dimension: usize,
    /// Lipschitz constant `L` of the losses; the clipping norm must be at least this, or clipping bends the gradients.
    pub lipschitz: f64,
    /// Distance `‖θ* − θ₀‖` to the comparator.
    pub distance: f64,
    /// Standard deviation of the entries of `Z`, `σγζ` for a calibrated mechanism.
    pub noise_std: f64,
    /// `‖B‖_F` of the factorization of the prefix sum, the square root of the total loss at unit sensitivity.
    pub decoder_norm: f64,
}

/// Mean regret of noisy gradient descent on convex losses, term by term.
///
/// `(1/n) Σ E[ℓ_t(θ_t) − ℓ_t(θ*)] ≤ η L² + ‖θ* − θ₀‖²/(2ηn) + L η s √(d/n) ‖B‖_F`
///
/// The paper prints the last term without `√d`; its own last line is `E‖BZ‖_F² = s² d ‖B‖_F²`, because `Z` has
/// `d` columns. At `d = 1` the two agree.
///
/// Reference: Proposition 4.1 of \[DMRST22\], with θ₀ = 0 there.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct RegretBound {
    /// Step size η.
    pub learning_rate: f64,
    /// `η L²`.
    pub stability: f64,
    /// `‖θ* − θ₀‖²/(2ηn)`.
    pub travel: f64,
    /// `L η s √(d/n) ‖B‖_F`: the price of privacy.
    pub noise: f64,
    /// The sum of the three.
    pub total: f64,
}

impl RegretSetting {
    /// The bound at one step size.
    ///
    /// Guarantee: every term is rounded up.
    /// Errors: no steps, no dimension, a number that is not positive and finite (zero noise and zero distance
    /// are allowed), a bound that overflows.
    pub fn at(&self, learning_rate: f64) -> Result<RegretBound> {
        self.check()?;
        check_positive("learning rate", learning_rate)?;
        let eta = Interval::exact(learning_rate);
        let stability = eta * Interval::exact(self.lipschitz).square();
        let travel = Interval::exact(self.distance).square() / (eta * 2.0 * self.steps as f64);
        let noise = eta * self.noise_slope();
        let bound = RegretBound {
            learning_rate,
            stability: stability.hi,
            travel: travel.hi,
            noise: noise.hi,
            total: (stability + travel + noise).hi,
        };
        if bound.total.is_infinite() {
            return Err(Error::argument(
                "learning rate",
                learning_rate,
                "the bound is too large to be a number",
            ));
        }
        Ok(bound)
    }

    /// The bound at the step size that minimises it, `η = ‖θ* − θ₀‖ / √(2n (L² + L s √(d/n) ‖B‖_F))`.
    ///
    /// Errors: as [`RegretSetting::at`]; a distance of zero, where the best step size is none.
    pub fn best(&self) -> Result<RegretBound> {
        self.check()?;
        check_positive("distance", self.distance)?;
        let slope = self.lipschitz * self.lipschitz + self.noise_slope().hi;
        self.at(self.distance / (2.0 * self.steps as f64 * slope).sqrt())
    }

    /// `L s √(d/n) ‖B‖_F`.
    fn noise_slope(&self) -> Interval {
        let ratio = (Interval::exact(self.dimension as f64) / self.steps as f64).sqrt();
        ratio * self.lipschitz * self.noise_std * self.decoder_norm
    }

    fn check(&self) -> Result<()> {
        if self.steps == 0 {
            return Err(Error::argument("steps", 0, "at least one step is needed"));
        }
        if self.dimension == 0 {
            return Err(Error::argument("dimension", 0, "a model has at least one coordinate"));
        }
        check_positive("lipschitz constant", self.lipschitz)?;
        check_positive("decoder norm", self.decoder_norm)?;
        for (name, value) in [("distance", self.distance), ("noise standard deviation", self.noise_std)] {
            if !(value >= 0.0 && value.is_finite()) {
                return Err(Error::argument(name, value, "it must be finite and not negative"));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SETTING: RegretSetting = RegretSetting {
        steps: 4,
        dimension: 1,
        lipschitz: 2.0,
        distance: 3.0,
        noise_std: 0.5,
        decoder_norm: 6.0,
    };

    #[test]
    fn the_three_terms_by_hand() {
        // η L² = 0.1·4; 9/(2·0.1·4) = 11.25; L s η ‖B‖/√n = 2·0.5·0.1·6/2 = 0.3.
        let bound = SETTING.at(0.1).unwrap();
        for (value, expected) in
            [(bound.stability, 0.4), (bound.travel, 11.25), (bound.noise, 0.3), (bound.total, 11.95)]
        {
            assert!((value - expected).abs() < 1e-13 && value >= expected - 1e-15, "{value} {expected}");
        }
        // Nine coordinates triple the noise term and nothing else.
        let wide = RegretSetting { dimension: 9, ..SETTING }.at(0.1).unwrap();
        assert!((wide.noise - 0.9).abs() < 1e-13 && wide.travel == bound.travel);
    }

    #[test]
    fn the_best_step_size_is_the_best() {
        let best = SETTING.best().unwrap();
        for factor in [0.5, 0.99, 1.01, 2.0] {
            assert!(SETTING.at(best.learning_rate * factor).unwrap().total > best.total);
        }
        // √(2 · 9/4 · (4 + 3)): the minimum of aη + b/η is 2√(ab).
        assert!((best.total - 2.0 * (7.0_f64 * 9.0 / 8.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_bound_holds_and_needs_the_dimension() {
        // ℓ(θ) = ‖θ − θ*‖ in 100 dimensions, independent noise on every gradient (B = S), 50 runs. With the noise
        // this large the bound is nearly attained, and without √d it would be passed several times over.
        use crate::audit::game::rng;
        use rand_distr::{Distribution, StandardNormal};
        let (n, d, eta, runs) = (64, 100, 0.1, 50);
        let decoder_norm = (n as f64 * (n as f64 + 1.0) / 2.0).sqrt();
        let setting = RegretSetting {
            steps: n,
            dimension: d,
            lipschitz: 1.0,
            distance: 1.0,
            noise_std: 5.0,
            decoder_norm,
        };
        let mut rng = rng(4, 0);
        let mut regret = 0.0;
        for _ in 0..runs {
            // θ* is the origin and θ₀ at distance 1 from it.
            let mut theta = vec![0.0; d];
            theta[0] = 1.0;
            for _ in 0..n {
                let norm = theta.iter().map(|x| x * x).sum::<f64>().sqrt();
                regret += norm / f64::from(runs) / n as f64;
                for x in &mut theta {
                    let noise: f64 = StandardNormal.sample(&mut rng);
                    *x -= eta * (*x / norm + setting.noise_std * noise);
                }
            }
        }
        let (bound, printed) =
            (setting.at(eta).unwrap(), RegretSetting { dimension: 1, ..setting }.at(eta).unwrap());
        assert!(regret < bound.total && regret > 0.7 * bound.total, "{regret} {bound:?}");
        assert!(regret > 4.0 * printed.total, "{regret} {printed:?}");
    }

    #[test]
    fn bad_input_is_named() {
        let message = |setting: RegretSetting| setting.at(0.1).unwrap_err().to_string();
        assert!(message(RegretSetting { steps: 0, ..SETTING }).starts_with("steps is 0"));
        assert!(message(RegretSetting { dimension: 0, ..SETTING }).starts_with("dimension is 0"));
        assert!(
            message(RegretSetting { lipschitz: f64::NAN, ..SETTING })
                .starts_with("lipschitz constant is NaN")
        );
        assert!(
            message(RegretSetting { noise_std: -1.0, ..SETTING })
                .starts_with("noise standard deviation is -1")
        );
        assert!(SETTING.at(0.0).unwrap_err().to_string().starts_with("learning rate is 0"));
        assert!(
            RegretSetting { distance: 0.0, ..SETTING }
                .best()
                .unwrap_err()
                .to_string()
                .starts_with("distance is 0")
        );
    }
}
