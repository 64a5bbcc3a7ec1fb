//! The state space: `u = d z + hᵀs`, `s ← s + E s + g z`, all states of a coordinate in registers.

use super::StateSpace;
use crate::engine::exact::program::{Draw, OUTPUT, Place, Program, Step as ProgramStep};
use crate::engine::{Engine, Kernel, PACKET, Packet, fill_packets, singles};
use crate::engine::{Field, Row};
use crate::error::Result;
use crate::simd::dispatch;

/// A filter of `r` states with triangular or, where the filter allows, diagonal increments.
///
/// Every coordinate does `u = d z + h₀s₀ + h₁s₁ + …` from left to right, then for `k = 0, 1, …`
/// `s_k ← s_k + (g_k z + E_kk s_k + E_{k,k+1} s_{k+1} + …)`.
pub(super) struct StateSpaceEngine {
    order: usize,
    direct: Vec<f32>,
    output: Vec<f32>,
    input: Vec<f32>,
    increment: Vec<f32>,
    diagonal: bool,
}

/// The coefficients of one step.
#[derive(Clone, Copy)]
struct Step<'a> {
    direct: f32,
    output: &'a [f32],
    input: &'a [f32],
    /// The rows of an upper triangle.
    increment: &'a [f32],
}

impl StateSpaceEngine {
    pub(super) fn new(filter: &StateSpace) -> Result<Self> {
        let (order, parts) = (filter.order(), filter.parts());
        let increment = singles("increment coefficients", &parts.increment)?;
        let steps = increment.chunks_exact((order * (order + 1) / 2).max(1));
        let mut places = steps.flat_map(|step| upper(order).zip(step));
        Ok(Self {
            order,
            direct: singles("direct coefficients", &parts.direct)?,
            output: singles("output coefficients", &parts.output)?,
            input: singles("input coefficients", &parts.input)?,
            diagonal: places.all(|((k, l), &e)| k == l || e == 0.0),
            increment,
        })
    }

    fn step(&self, i: usize) -> Step<'_> {
        let (r, triangle) = (self.order, self.order * (self.order + 1) / 2);
        Step {
            direct: self.direct[i],
            output: &self.output[i * r..][..r],
            input: &self.input[i * r..][..r],
            increment: &self.increment[i * triangle..][..triangle],
        }
    }
}

/// Places of a packed upper triangle, row by row.
fn upper(order: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..order).flat_map(move |k| (k..order).map(move |l| (k, l)))
}

impl Engine for StateSpaceEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.order
    }

    fn kernel<'a>(&'a self, field: &'a Field, step: usize) -> Box<dyn Kernel + 'a> {
        let row = field.row(step as u64);
        macro_rules! of_order {
            ($($order:literal)*) => {
                match (self.order, self.diagonal) {
                    $(
                        ($order, false) => Box::new(Fixed::<$order, false>::new(self.step(step), row)),
                        ($order, true) => Box::new(Fixed::<$order, true>::new(self.step(step), row)),
                    )*
                    _ => Box::new(General { row, step: self.step(step) }),
                }
            };
        }
        // Beyond nine the states and their coefficients no longer fit the registers.
        of_order!(1 2 3 4 5 6 7 8 9)
    }
}

impl Program for StateSpaceEngine {
    fn steps(&self) -> usize {
        self.direct.len()
    }

    fn buffers(&self) -> usize {
        self.order
    }

    fn step(&self, t: usize) -> ProgramStep {
        let (z, s) = (Place::Draw(0), Place::Buffer);
        let coefficients = self.step(t);
        let mut step = ProgramStep { draws: vec![Draw::first(t)], ..ProgramStep::default() };
        let output = coefficients.output.iter().enumerate().map(|(k, &h)| (s(k), h));
        step.assign(OUTPUT, [(z, coefficients.direct)].into_iter().chain(output));
        let mut increment = coefficients.increment.iter();
        for (k, &g) in coefficients.input.iter().enumerate() {
            // The state itself comes last: what is added up before it is small, and so is its rounding.
            let change = (k..self.order).zip(&mut increment).map(|(l, &e)| (s(l), e));
            step.assign(s(k), [(z, g)].into_iter().chain(change).chain([(s(k), 1.0)]));
        }
        step
    }
}

/// The coefficients of a step, by places; below the diagonal the increment is zero.
#[derive(Clone, Copy)]
struct Coefficients<const R: usize> {
    direct: f32,
    output: [f32; R],
    input: [f32; R],
    increment: [[f32; R]; R],
}

struct Fixed<const R: usize, const DIAGONAL: bool> {
    row: Row,
    coefficients: Coefficients<R>,
}

impl<const R: usize, const DIAGONAL: bool> Fixed<R, DIAGONAL> {
    fn new(step: Step<'_>, row: Row) -> Self {
        let mut increment = [[0.0; R]; R];
        for ((k, l), &e) in upper(R).zip(step.increment) {
            increment[k][l] = e;
        }
        let coefficients = Coefficients {
            direct: step.direct,
            output: std::array::from_fn(|k| step.output[k]),
            input: std::array::from_fn(|k| step.input[k]),
            increment,
        };
        Self { row, coefficients }
    }
}

impl<const R: usize, const DIAGONAL: bool> Kernel for Fixed<R, DIAGONAL> {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        let (state, _) = state.as_chunks_mut();
        advance::<R, DIAGONAL>(&self.coefficients, state, noise);
    }
}

#[inline(always)]
fn advance_any<const R: usize, const DIAGONAL: bool>(
    step: &Coefficients<R>,
    state: &mut [[Packet; R]],
    noise: &mut [Packet],
) {
    let c = *step;
    for (state, noise) in state.iter_mut().zip(noise) {
        let mut u = *noise;
        for l in 0..PACKET {
            let z = u[l];
            let mut s: [f32; R] = std::array::from_fn(|k| state[k][l]);
            u[l] = c.direct * z;
            for k in 0..R {
                u[l] += c.output[k] * s[k];
            }
            for k in 0..R {
                let mut change = c.input[k] * z;
                for m in k..if DIAGONAL { k + 1 } else { R } {
                    change += c.increment[k][m] * s[m];
                }
                s[k] += change;
            }
            for k in 0..R {
                state[k][l] = s[k];
            }
        }
        *noise = u;
    }
}

dispatch! {
    fn advance / advance_portable / advance_avx2 = advance_any[const R: usize, const DIAGONAL: bool](
        step: &Coefficients<R>, state: &mut [[Packet; R]], noise: &mut [Packet]
    );
}

/// Any order: the same operations, one buffer after the other.
struct General<'a> {
    row: Row,
    step: Step<'a>,
}

impl Kernel for General<'_> {
    fn run(&self, first: u64, state: &mut [Packet], noise: &mut [Packet]) {
        fill_packets(&self.row, first, noise);
        if self.step.output.is_empty() {
            noise.as_flattened_mut().iter_mut().for_each(|z| *z *= self.step.direct);
        } else {
            advance_general(self.step, state, noise);
        }
    }
}

#[inline(always)]
fn advance_general_any(step: Step<'_>, state: &mut [Packet], noise: &mut [Packet]) {
    for (state, noise) in state.chunks_exact_mut(step.output.len()).zip(noise) {
        let z = *noise;
        let mut u = z.map(|z| step.direct * z);
        for (s, &h) in state.iter().zip(step.output) {
            for l in 0..PACKET {
                u[l] += h * s[l];
            }
        }
        *noise = u;
        let mut increment = step.increment.iter();
        for (k, &g) in step.input.iter().enumerate() {
            let mut change = z.map(|z| g * z);
            // The states from k on are still those of before the step.
            for (s, &e) in state[k..].iter().zip(&mut increment) {
                for l in 0..PACKET {
                    change[l] += e * s[l];
                }
            }
            for l in 0..PACKET {
                state[k][l] += change[l];
            }
        }
    }
}

dispatch! {
    fn advance_general / advance_general_portable / advance_general_avx2 = advance_general_any(
        step: Step<'_>, state: &mut [Packet], noise: &mut [Packet]
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packets<const N: usize>(seed: u32) -> [Packet; N] {
        let value = |i: u32| f32::from(((i + seed).wrapping_mul(2_654_435_761) >> 16) as u16) / 32768.0 - 1.0;
        std::array::from_fn(|k| std::array::from_fn(|l| value((k * PACKET + l) as u32)))
    }

    type Advance<'a, const R: usize> = &'a dyn Fn(&mut [[Packet; R]], &mut [Packet]);

    fn same_bits<const R: usize, const DIAGONAL: bool>() {
        let coefficients = Coefficients {
            direct: 0.9,
            output: std::array::from_fn(|k| 0.3 - 0.1 * k as f32),
            input: std::array::from_fn(|k| 0.2 + 0.1 * k as f32),
            increment: std::array::from_fn(|k| {
                std::array::from_fn(|l| match l.cmp(&k) {
                    std::cmp::Ordering::Less => 0.0,
                    std::cmp::Ordering::Equal => -0.1,
                    std::cmp::Ordering::Greater if DIAGONAL => 0.0,
                    std::cmp::Ordering::Greater => 0.03 * (l - k) as f32,
                })
            }),
        };
        let increment: Vec<f32> = upper(R).map(|(k, l)| coefficients.increment[k][l]).collect();
        let general = Step {
            direct: coefficients.direct,
            output: &coefficients.output,
            input: &coefficients.input,
            increment: &increment,
        };
        let run = |step: Advance<'_, R>| {
            let (mut state, mut noise) = ([packets::<R>(1), packets::<R>(2)], packets::<2>(3));
            step(&mut state, &mut noise);
            state.as_flattened().iter().chain(&noise).flatten().map(|x| x.to_bits()).collect::<Vec<_>>()
        };
        let dispatched = run(&|s, z| advance::<R, DIAGONAL>(&coefficients, s, z));
        assert_eq!(dispatched, run(&|s, z| advance_portable::<R, DIAGONAL>(&coefficients, s, z)));
        assert_eq!(dispatched, run(&|s, z| advance_general(general, s.as_flattened_mut(), z)));
        assert_eq!(dispatched, run(&|s, z| advance_general_portable(general, s.as_flattened_mut(), z)));
    }

    #[test]
    fn every_kernel_and_instruction_set_gives_the_same_bits() {
        same_bits::<1, false>();
        same_bits::<3, false>();
        same_bits::<4, false>();
        same_bits::<4, true>();
        same_bits::<9, false>();
        same_bits::<9, true>();
    }
}
