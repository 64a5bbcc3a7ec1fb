//! Uniform numbers for parameters before training.

use chacha20::ChaCha8Rng;
use rand::{Rng, SeedableRng};

/// A stream of uniform numbers: a pure function of the seed, on every machine.
pub(super) struct Uniform(ChaCha8Rng);

impl Uniform {
    pub(super) fn new(seed: u64) -> Self {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        Self(ChaCha8Rng::from_seed(key))
    }

    /// Fills a block with numbers of mean zero and standard deviation `deviation`, within √3 of them.
    pub(super) fn fill(&mut self, block: &mut [f32], deviation: f32) {
        let limit = deviation * 3f32.sqrt();
        for value in block {
            // 24 bits about zero, each representable: no rounding before the scale.
            let centred = (self.0.next_u32() >> 8) as f32 + 0.5 - 8_388_608.0;
            *value = centred * (limit / 8_388_608.0);
        }
    }

    /// Fills the weights of a layer so that inputs of unit variance give outputs of variance `gain²`.
    pub(super) fn fill_layer(&mut self, block: &mut [f32], inputs: usize, gain: f32) {
        self.fill(block, gain / (inputs.max(1) as f32).sqrt());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_the_promised_moments_and_bounds() {
        let mut block = vec![0.0; 100_000];
        Uniform::new(7).fill(&mut block, 0.5);
        let mean = block.iter().map(|&x| f64::from(x)).sum::<f64>() / 1e5;
        let square = block.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / 1e5;
        // Five standard errors: 0.5/√1e5 for the mean, 0.25·√(4/5)/√1e5 for the square.
        assert!(mean.abs() < 0.008, "{mean}");
        assert!((square - 0.25).abs() < 0.0036, "{square}");
        assert!(block.iter().all(|x| x.abs() <= 0.866_026));
        assert_ne!(block[..50_000], block[50_000..]);
    }

    #[test]
    fn bits_are_stable() {
        let mut block = [0.0; 4];
        Uniform::new(1).fill(&mut block, 1.0);
        assert_eq!(block.map(f32::to_bits), [1_055_130_792, 3_201_446_230, 1_069_431_837, 3_207_978_057]);
    }
}
