use super::*;
use std::collections::BTreeSet;
use std::fmt::Write;

fn sampler(sampling: &str, units: usize, steps: usize, seed: u64) -> Result<Sampler> {
    Sampler::new(&NoiseKey::from_seed(seed), RunId::from_label("test"), sampling.parse()?, units, steps)
}

fn members(sampler: &Sampler) -> Vec<Vec<u32>> {
    (0..sampler.steps()).map(|step| sampler.members(step).unwrap()).collect()
}

/// Value stability, format 1: a change here is a new format.
#[test]
fn draws_are_fixed() {
    let mut text = String::new();
    for sampling in ["cyclic-poisson:1:0.25", "cyclic-poisson:3:0.5", "balls-in-bins:4", "reshuffled-bins:4"]
    {
        let sampler = sampler(sampling, 20, 5, 7).unwrap();
        writeln!(text, "{sampling} {:?}", members(&sampler)).unwrap();
    }
    assert_eq!(SAMPLER_FORMAT, 1);
    assert_eq!(text, include_str!("draws-1.txt"));
}

/// By AES alone, without the batches, the parts laid out by turns and the rest of it.
#[test]
fn draws_are_what_the_format_says() {
    let (key, run) = (NoiseKey::from_seed(3), RunId([9; 16]));
    let sampling = Sampling::CyclicPoisson { bands: 3, rate: 0.3 };
    let sampler = Sampler::new(&key, run, sampling, 500, 7).unwrap();
    let first_word = |secret: &[u8; 32], block: [u8; 16]| {
        let mut block: Block = Array(block);
        Aes256::new(secret.into()).encrypt_block(&mut block);
        u64::from_le_bytes(block[..8].try_into().unwrap())
    };
    let (parts, coins) = (key.sampling(sampling, run, "parts"), key.sampling(sampling, run, "coins"));
    for step in 0..7_u64 {
        let mut row = [0; 32];
        for i in 0..4_u32 {
            let mut block = [0; 16];
            block[..8].copy_from_slice(&step.to_le_bytes());
            block[8..12].copy_from_slice(&i.to_le_bytes());
            block[12..].copy_from_slice(b"row ");
            row[8 * i as usize..][..8].copy_from_slice(&first_word(&coins, block).to_le_bytes());
        }
        let expected: Vec<u32> = (0..500_u32)
            .filter(|&unit| {
                let mut block = [0; 16];
                block[..4].copy_from_slice(&unit.to_le_bytes());
                block[12..].copy_from_slice(b"part");
                // No word in 2⁶² is refused here.
                first_word(&parts, block) % 3 == step % 3
            })
            .filter(|&unit| {
                (first_word(&row, u128::from(unit).to_le_bytes()) as f64) < 0.3 * 2.0_f64.powi(64)
            })
            .collect();
        assert_eq!(sampler.members(step as usize).unwrap(), expected, "step {step}");
    }
}

#[test]
fn members_and_turns_tell_the_same() {
    for sampling in [
        "cyclic-poisson:1:0.3",
        "cyclic-poisson:4:0.5",
        "cyclic-poisson:4:1",
        "balls-in-bins:5",
        "reshuffled-bins:5",
    ] {
        let sampler = sampler(sampling, 300, 23, 1).unwrap();
        let steps = members(&sampler);
        for unit in 0..300 {
            let turns: Vec<usize> = (0..23).filter(|&step| steps[step].contains(&(unit as u32))).collect();
            assert_eq!(sampler.turns(unit).unwrap(), turns, "{sampling}, unit {unit}");
        }
        assert!(steps.iter().all(|members| members.is_sorted()));
    }
}

#[test]
fn units_keep_to_their_parts() {
    let sampler = sampler("balls-in-bins:5", 1000, 17, 1).unwrap();
    let steps = members(&sampler);
    for step in 5..17 {
        assert_eq!(steps[step], steps[step - 5]);
    }
    let seen: BTreeSet<u32> = steps[..5].iter().flatten().copied().collect();
    assert_eq!((seen.len(), steps[..5].iter().map(Vec::len).sum()), (1000, 1000));
    let sampler = super::tests::sampler("cyclic-poisson:4:0.5", 1000, 40, 1).unwrap();
    for unit in 0..1000 {
        let turns = sampler.turns(unit).unwrap();
        assert!(turns.windows(2).all(|pair| (pair[1] - pair[0]).is_multiple_of(4)), "{unit}: {turns:?}");
    }
}

#[test]
fn a_unit_that_joins_moves_no_other_and_steps_do_not_matter() {
    for sampling in ["cyclic-poisson:3:0.4", "balls-in-bins:6", "reshuffled-bins:6"] {
        let few = sampler(sampling, 400, 12, 5).unwrap();
        let more = sampler(sampling, 1000, 30, 5).unwrap();
        for step in 0..12 {
            let old: Vec<u32> = more.members(step).unwrap().into_iter().filter(|unit| *unit < 400).collect();
            assert_eq!(few.members(step).unwrap(), old, "{sampling}, step {step}");
        }
    }
}

#[test]
fn keys_runs_and_kinds_draw_apart() {
    let draw = |seed, run, sampling: &str| {
        let (key, run) = (NoiseKey::from_seed(seed), RunId::from_label(run));
        members(&Sampler::new(&key, run, sampling.parse().unwrap(), 200, 4).unwrap())
    };
    let base = draw(1, "a", "cyclic-poisson:2:0.5");
    assert_eq!(base, draw(1, "a", "cyclic-poisson:2:0.5"));
    assert_ne!(base, draw(2, "a", "cyclic-poisson:2:0.5"));
    assert_ne!(base, draw(1, "b", "cyclic-poisson:2:0.5"));
    assert_ne!(draw(1, "a", "cyclic-poisson:2:1"), draw(1, "a", "balls-in-bins:2"));
}

#[test]
fn one_two_and_three_units() {
    // Certain coins and one part: everybody, always.
    for sampling in ["cyclic-poisson:1:1", "balls-in-bins:1", "reshuffled-bins:1"] {
        for units in 1..=3_u32 {
            let sampler = sampler(sampling, units as usize, 3, 0).unwrap();
            assert!(members(&sampler).iter().all(|members| members.iter().copied().eq(0..units)));
            assert_eq!(sampler.expected_batch(), f64::from(units));
        }
    }
    // A rate that rounds down to never.
    let never = sampler("cyclic-poisson:1:1e-30", 1000, 3, 0).unwrap();
    assert!(members(&never).iter().all(Vec::is_empty));
    // More bins than steps, by far: most units never take part, and nothing is laid out for them.
    let bins = sampler("balls-in-bins:18446744073709551615", 1000, 3, 0).unwrap();
    assert!(members(&bins).iter().all(Vec::is_empty) && bins.turns(0).unwrap().is_empty());
    let wide = sampler("balls-in-bins:10", 1000, 3, 0).unwrap();
    let count: usize = members(&wide).iter().map(Vec::len).sum();
    assert!((200..400).contains(&count), "{count}");
    assert_eq!(wide.expected_batch(), 100.0);
    assert_eq!(sampler("cyclic-poisson:4:0.02", 1000, 3, 0).unwrap().expected_batch(), 5.0);
}

#[test]
fn the_rejected_words_are_drawn_again() {
    // Just above half of 2⁶⁴ parts: every second first word is refused.
    let key = NoiseKey::from_seed(1);
    let sampling = Sampling::BallsInBins { bins: (1 << 63) + 1 };
    let coins = Coins::new(&key, RunId([0; 16]), sampling).unwrap();
    let refused = (0..1000).filter(|&unit| {
        let mut block = coins.dealing(unit, 0, 0);
        coins.dealer.encrypt_block(&mut block);
        assert!(coins.part(unit, 0) <= 1 << 63);
        coins.part(unit, 0) != word(&block) % coins.parts
    });
    // 500 ± 16; six deviations, α = 2e-9.
    assert!(refused.count().abs_diff(500) < 95);
}

#[test]
fn bad_input_is_named() {
    let message = |sampling: Sampling, units, steps| {
        let result = Sampler::new(&NoiseKey::from_seed(0), RunId([0; 16]), sampling, units, steps);
        result.err().unwrap().to_string()
    };
    let poisson = |bands, rate| Sampling::CyclicPoisson { bands, rate };
    assert!(message(Sampling::None, 10, 10).contains("the order is up to you"));
    assert!(message(poisson(1, 0.5), 0, 10).starts_with("units is 0"));
    assert!(message(poisson(1, 0.5), 1 << 32, 10).starts_with("units is 4294967296"));
    assert!(message(poisson(1, 0.5), 10, 0).starts_with("steps is 0"));
    assert!(message(poisson(0, 0.5), 10, 10).starts_with("bands is 0"));
    assert!(message(Sampling::BallsInBins { bins: 0 }, 10, 10).starts_with("bins is 0"));
    for rate in [0.0, -1.0, 1.5, f64::NAN, f64::INFINITY] {
        assert!(message(poisson(1, rate), 10, 10).starts_with(&format!("rate is {rate}")));
    }
    let sampler = sampler("balls-in-bins:2", 10, 10, 0).unwrap();
    assert!(sampler.members(10).unwrap_err().to_string().starts_with("step is 10"));
    assert!(sampler.turns(10).unwrap_err().to_string().starts_with("unit is 10"));
}

/// `(count − Np)/√(Np(1−p))`.
fn deviation(count: usize, trials: usize, p: f64) -> f64 {
    let mean = trials as f64 * p;
    (count as f64 - mean) / (mean * (1.0 - p)).sqrt()
}

/// Two-sided at six deviations, α = 2e-9.
const DEVIATIONS: f64 = 6.0;

#[test]
fn coins_have_their_rate() {
    let (bands, rate, units, steps) = (3, 0.1, 30_000, 60);
    let total = |rate: f64| {
        let sampler = sampler(&format!("cyclic-poisson:{bands}:{rate}"), units, steps, 11).unwrap();
        members(&sampler).iter().map(Vec::len).sum::<usize>()
    };
    // A unit has its turn in every third step.
    let trials = units * steps / bands;
    let honest = deviation(total(rate), trials, rate);
    assert!(honest.abs() < DEVIATIONS, "{honest}");
    // Power: a rate that is 5 % too high is found.
    let high = deviation(total(rate * 1.05), trials, rate);
    assert!(high > DEVIATIONS, "{high}");
}

#[test]
fn parts_are_even() {
    // χ² of 9 degrees exceeds 60 with α = 1e-9.
    let (bins, units) = (10, 200_000);
    let chi_sq = |counts: &[usize]| {
        let total: usize = counts.iter().sum();
        let mean = total as f64 / bins as f64;
        counts.iter().map(|&count| (count as f64 - mean).powi(2) / mean).sum::<f64>()
    };
    let mut counts: Vec<usize> =
        members(&sampler("balls-in-bins:10", units, bins, 12).unwrap()).iter().map(Vec::len).collect();
    assert!(chi_sq(&counts) < 60.0, "{counts:?}");
    // Power: a phase that is chosen 5 % too often is found.
    let moved = counts[3] / 20;
    counts[3] += moved;
    counts[4] -= moved;
    assert!(chi_sq(&counts) > 60.0, "{counts:?}");
}

/// Whether two halves of a table of draws go together: the deviation of the number of common yeses.
#[test]
fn coins_of_units_and_of_steps_are_independent() {
    let (units, steps, rate) = (2000, 400, 0.3);
    let sampler = sampler("cyclic-poisson:1:0.3", units, steps, 13).unwrap();
    let mut table = vec![false; units * steps];
    for (step, members) in members(&sampler).iter().enumerate() {
        members.iter().for_each(|unit| table[step * units + *unit as usize] = true);
    }
    // The next unit, the next step, and units whose words share a batch: the pairs of a lag are independent enough.
    for lag in [1, 2, 8, BATCH, units, 2 * units, units + 1] {
        let pairs = table.len() - lag;
        let both = (0..pairs).filter(|&i| table[i] && table[i + lag]).count();
        let off = deviation(both, pairs, rate * rate);
        // Overlapping pairs have a variance of up to (1 + 2q) of that of independent ones.
        assert!(off.abs() < DEVIATIONS * (1.0_f64 + 2.0 * rate).sqrt(), "lag {lag}: {off}");
        // Power: one draw in twenty repeated at that lag is found.
        let mut repeated = table.clone();
        (0..pairs).step_by(20).for_each(|i| repeated[i + lag] = repeated[i]);
        let both = (0..pairs).filter(|&i| repeated[i] && repeated[i + lag]).count();
        assert!(deviation(both, pairs, rate * rate) > DEVIATIONS * 1.3, "lag {lag}");
    }
}

#[test]
fn a_part_says_nothing_of_the_coins_or_of_the_next_unit() {
    let (units, bands) = (60_000, 4);
    let sampler = sampler("cyclic-poisson:4:0.5", units, 2 * bands, 14).unwrap();
    for step in 0..2 * bands {
        let off = deviation(sampler.members(step).unwrap().len(), units, 0.5 / bands as f64);
        assert!(off.abs() < DEVIATIONS, "step {step}: {off}");
    }
    let coins = &sampler.coins;
    let same = (1..units as u32).filter(|&unit| coins.part(unit, 0) == coins.part(unit - 1, 0)).count();
    assert!(deviation(same, units - 1, 0.25).abs() < DEVIATIONS, "{same}");
}

/// Bins that are drawn anew: by AES alone, once in every epoch, evenly, and each epoch apart from the others.
#[test]
fn reshuffled_bins_are_drawn_anew_in_every_epoch() {
    let (bins, units, epochs) = (10_usize, 100_000_usize, 4_usize);
    let (key, run) = (NoiseKey::from_seed(5), RunId([7; 16]));
    let sampling = Sampling::ReshuffledBins { bins };
    // The last epoch is cut short.
    let steps = bins * epochs - 3;
    let sampler = Sampler::new(&key, run, sampling, units, steps).unwrap();
    let secret = key.sampling(sampling, run, "parts");
    let drawn = |unit: u32, epoch: u32| {
        let mut block = [0; 16];
        block[..4].copy_from_slice(&unit.to_le_bytes());
        block[4..8].copy_from_slice(&epoch.to_le_bytes());
        block[12..].copy_from_slice(b"bins");
        let mut block: Block = Array(block);
        Aes256::new((&*secret).into()).encrypt_block(&mut block);
        // No word in 2⁶⁰ is refused here.
        (u64::from_le_bytes(block[..8].try_into().unwrap()) % bins as u64) as usize
    };
    let mut bin_of = vec![vec![usize::MAX; units]; epochs];
    for step in 0..steps {
        for unit in sampler.members(step).unwrap() {
            let bin = &mut bin_of[step / bins][unit as usize];
            assert_eq!(*bin, usize::MAX, "twice in an epoch");
            *bin = step % bins;
        }
    }
    for unit in (0..units).step_by(997) {
        for (epoch, bins_of) in bin_of.iter().enumerate() {
            let expected = drawn(unit as u32, epoch as u32);
            let missed = epoch * bins + expected >= steps;
            assert_eq!(bins_of[unit], if missed { usize::MAX } else { expected });
        }
    }
    // Epochs are independent: pairs of bins of two epochs are even, χ² of 99 degrees exceeds 200 with α below 1e-8.
    let chi_sq = |first: &[usize], second: &[usize]| {
        let mut counts = vec![0_usize; bins * bins];
        first.iter().zip(second).for_each(|(a, b)| counts[a * bins + b] += 1);
        let mean = units as f64 / (bins * bins) as f64;
        counts.iter().map(|&count| (count as f64 - mean).powi(2) / mean).sum::<f64>()
    };
    for (a, b) in [(0, 1), (1, 2), (0, 2)] {
        assert!(chi_sq(&bin_of[a], &bin_of[b]) < 200.0);
    }
    // Power: one unit in twenty that keeps its bin is found.
    let mut kept = bin_of[1].clone();
    (0..units).step_by(20).for_each(|unit| kept[unit] = bin_of[0][unit]);
    assert!(chi_sq(&bin_of[0], &kept) > 200.0);
}
