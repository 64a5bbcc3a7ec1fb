//! Means of repeated runs, with confidence intervals.

/// A mean and its 95 % confidence interval.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Estimate {
    /// The mean.
    pub mean: f64,
    /// Half the width of the interval by Student's t; unknown for a single value.
    pub half_width: Option<f64>,
}

impl Estimate {
    /// The estimate from independent repetitions; `None` if there are none.
    pub fn of(values: &[f64]) -> Option<Self> {
        if values.is_empty() {
            return None;
        }
        let n = values.len() as f64;
        let mean = values.iter().sum::<f64>() / n;
        if values.len() == 1 {
            return Some(Self { mean, half_width: None });
        }
        let variance = values.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / (n - 1.0);
        Some(Self { mean, half_width: Some(t_quantile(values.len() - 1) * (variance / n).sqrt()) })
    }

    /// The interval.
    pub fn interval(&self) -> Option<[f64; 2]> {
        self.half_width.map(|half| [self.mean - half, self.mean + half])
    }
}

/// 97.5 % quantile of Student's t; beyond 30 degrees of freedom by its expansion around the normal's.
fn t_quantile(degrees: usize) -> f64 {
    const TABLE: [f64; 30] = [
        12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788,
        2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639,
        2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
    ];
    const Z: f64 = 1.959_964;
    let n = degrees as f64;
    let first = (Z.powi(3) + Z) / (4.0 * n);
    let second = (5.0 * Z.powi(5) + 16.0 * Z.powi(3) + 3.0 * Z) / (96.0 * n * n);
    TABLE.get(degrees - 1).copied().unwrap_or(Z + first + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals_by_hand() {
        assert_eq!(Estimate::of(&[]), None);
        assert_eq!(Estimate::of(&[2.0]).unwrap().interval(), None);
        // Standard error 1/√3 of 1, 2, 3.
        let three = Estimate::of(&[1.0, 2.0, 3.0]).unwrap();
        assert_eq!(three.mean, 2.0);
        assert!((three.half_width.unwrap() - 4.3027 / 3.0_f64.sqrt()).abs() < 1e-12);
        // The expansion takes over from the table; 2.0395 and 1.9840 are its values at 31 and 100.
        assert!((t_quantile(31) - 2.0395).abs() < 1e-4 && (t_quantile(100) - 1.9840).abs() < 1e-4);
    }
}
