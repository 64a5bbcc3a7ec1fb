//! The adaptive privacy game of the paper's Section 2.
//!
//! The referee keeps a secret bit. Step by step the adversary names two inputs, having seen every earlier
//! answer; the referee checks that the two streams can still be completed to neighbours, hands the one its
//! bit selects to the mechanism, and returns the answer. At the end the adversary scores how strongly it
//! believes in the second stream. A mechanism is private when no adversary's scores tell the bit.
//!
//! Many games are played in lockstep: a mechanism that noises a model of `w` coordinates is as many games as it
//! has independent blocks of coordinates, which is how the deployed engines are fastest.

use crate::accounting::{Adjacency, check_positive};
use crate::error::{Error, Result};
use crate::participation::{Participation, Pattern};
use chacha20::ChaCha8Rng;
use rand::{Rng, SeedableRng};
use serde::Serialize;

/// Randomness of a simulation: fast, seedable and the same on every platform. Never used for privacy noise.
pub type AuditRng = ChaCha8Rng;

/// The generator of one batch of games: batches of one seed are independent, whatever thread plays them.
pub fn rng(seed: u64, batch: u64) -> AuditRng {
    let mut rng = AuditRng::seed_from_u64(seed);
    rng.set_stream(batch);
    rng
}

/// A mechanism that answers a stream of inputs, one row a step.
pub trait StreamMechanism: Sync {
    /// Number of steps it serves.
    fn steps(&self) -> usize;

    /// Coordinates of one game's input.
    fn dimension(&self) -> usize;

    /// Starts `games` runs at once, on independent noise.
    fn start(&self, games: usize, rng: &mut AuditRng) -> Result<Box<dyn Session + '_>>;
}

/// Runs in progress.
pub trait Session {
    /// Replaces the next input of every game by the mechanism's answer.
    ///
    /// `rows` holds `dimension` coordinates of the first game, then of the second, and so on.
    fn answer(&mut self, rows: &mut [f64]) -> Result<()>;
}

/// A strategy of the privacy game.
pub trait Adversary: Sync {
    /// The name in reports.
    fn name(&self) -> &'static str;

    /// Someone to play it, one game after another.
    fn player(&self) -> Box<dyn Player + '_>;
}

/// Decides in secret when the unit takes part by which the two streams differ.
///
/// Without one the adversary decides, within the neighbour relation.
pub trait Lottery: Sync {
    /// Draws for one game.
    fn draw(&self, rng: &mut AuditRng) -> Result<Draw>;
}

/// What was drawn for one game.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Draw {
    /// The steps at which the unit may take part, which are public, in order.
    pub possible: Vec<usize>,
    /// Those of them at which it does, which are not.
    pub turns: Vec<usize>,
}

/// One game in progress, seen from the adversary's side.
pub trait Player {
    /// Forgets the last game.
    fn reset(&mut self);

    /// Learns, before the first step, when the unit may take part, where a lottery decides.
    fn tell(&mut self, _possible: &[usize]) {}

    /// Writes the inputs of the first and the second stream at `step`, both given as zeros.
    fn choose(&mut self, step: usize, first: &mut [f64], second: &mut [f64]);

    /// Takes the answer to the input that the referee handed on.
    fn observe(&mut self, step: usize, answer: &[f64]);

    /// Belief in the second stream: the larger, the stronger.
    fn score(&mut self) -> f64;
}

/// Which pairs of streams the adversary may choose.
///
/// Two streams are neighbours when they differ in at most `participations` steps, those steps at least
/// `separation` apart (or whole multiples of it, if `aligned`), each time by a vector of norm at most `ζ` times the adjacency's factor. What both streams
/// share is other people's data, and free.
///
/// Reference: Definition 3.1 of \[DMRST22\] for one participation.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Neighbours {
    /// The relation; it fixes how far the two inputs of one step may differ.
    pub adjacency: Adjacency,
    /// Clipping norm ζ.
    pub clip: f64,
    /// Steps in which one unit of privacy may take part.
    pub participations: usize,
    /// Least distance between two such steps.
    pub separation: usize,
    /// Whether their distances are multiples of it, as when the data is passed over in the same order.
    pub aligned: bool,
}

impl Neighbours {
    /// Streams that differ where one unit of privacy takes part.
    ///
    /// Errors: a clip that is not positive and finite; a pattern that does not fit the steps.
    pub fn new(participation: Participation, steps: usize, adjacency: Adjacency, clip: f64) -> Result<Self> {
        check_positive("clip", clip)?;
        let Pattern { times, separation, .. } = participation.pattern(steps)?;
        let (separation, aligned) =
            (separation.unwrap_or(1), matches!(participation, Participation::Epochs { .. }));
        Ok(Self { adjacency, clip, participations: times, separation, aligned })
    }

    /// Streams that differ in one step.
    ///
    /// Errors: a clip that is not positive and finite.
    pub fn single(adjacency: Adjacency, clip: f64) -> Result<Self> {
        Self::new(Participation::default(), 1, adjacency, clip)
    }

    /// Streams that may differ in every step, where a lottery decides in which they do.
    ///
    /// Errors: a clip that is not positive and finite; one record replaced with another, which is two that the lottery
    /// draws for.
    pub fn drawn(steps: usize, adjacency: Adjacency, clip: f64) -> Result<Self> {
        check_positive("clip", clip)?;
        if adjacency == Adjacency::ReplaceOne {
            return Err(Error::Unsupported {
                what: "the sampled game between data sets of which one record is replaced with another"
                    .into(),
                hint: "in the sampled game a unit is either there or not: use replace-with-zero or add-or-remove",
            });
        }
        Ok(Self { adjacency, clip, participations: steps, separation: 1, aligned: false })
    }

    /// Largest distance between the two inputs of a step.
    pub fn distance(&self) -> f64 {
        self.adjacency.sensitivity_factor() * self.clip
    }
}

/// What the referee remembers of one pair of streams: enough to know whether it can still be completed.
#[derive(Clone, Copy, Default)]
struct Watch {
    differences: usize,
    last: usize,
}

impl Watch {
    /// Accepts the inputs of a step, or says which rule they break.
    fn accept(&mut self, neighbours: &Neighbours, step: usize, first: &[f64], second: &[f64]) -> Result<()> {
        if first == second {
            return match first.iter().all(|x| x.is_finite()) {
                true => Ok(()),
                false => Err(foul(step, "a number that is not finite", "inputs must be finite")),
            };
        }
        let distance = first.iter().zip(second).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
        if distance.is_nan() || distance > neighbours.distance() {
            return Err(foul(
                step,
                format_args!("a difference of norm {distance}"),
                "it exceeds the clipping norm",
            ));
        }
        if self.differences == neighbours.participations {
            let what = format_args!("difference number {}", self.differences + 1);
            return Err(foul(step, what, "one unit of privacy takes part less often"));
        }
        if self.differences > 0 && step - self.last < neighbours.separation {
            let what = format_args!("a difference {} steps after the last", step - self.last);
            return Err(foul(step, what, "participations must lie further apart"));
        }
        if self.differences > 0
            && neighbours.aligned
            && !(step - self.last).is_multiple_of(neighbours.separation)
        {
            let what = format_args!("a difference {} steps after the last", step - self.last);
            return Err(foul(step, what, "participations must lie whole epochs apart"));
        }
        (self.differences, self.last) = (self.differences + 1, step);
        Ok(())
    }
}

fn foul(step: usize, what: impl std::fmt::Display, rule: &'static str) -> Error {
    Error::argument("adversary's choice", format!("{what} at step {step}"), rule)
}

/// How one game ended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Outcome {
    /// The referee's bit: whether the mechanism was given the second stream.
    pub second: bool,
    /// The adversary's belief that it was.
    pub score: f64,
}

/// Plays `games` games in lockstep and reveals the bits at the end.
///
/// With a lottery the mechanism is given the second input only at the turns that are drawn.
///
/// Guarantee: the player sees nothing but the answers, and the mechanism nothing but the selected stream; every
/// pair of inputs is checked before the mechanism sees it.
/// Cost: `games · steps` rounds.
/// Errors: an adversary that breaks the neighbour relation, with the step; whatever the mechanism reports.
pub fn play(
    mechanism: &dyn StreamMechanism,
    adversary: &dyn Adversary,
    neighbours: &Neighbours,
    lottery: Option<&dyn Lottery>,
    games: usize,
    rng: &mut AuditRng,
) -> Result<Vec<Outcome>> {
    let d = mechanism.dimension();
    let bits: Vec<bool> = (0..games).map(|_| rng.next_u32() & 1 == 1).collect();
    let draws = lottery
        .map(|lottery| (0..games).map(|_| lottery.draw(rng)).collect::<Result<Vec<_>>>())
        .transpose()?;
    let mut session = mechanism.start(games, rng)?;
    let mut players: Vec<_> = (0..games).map(|_| adversary.player()).collect();
    let mut watches = vec![Watch::default(); games];
    let mut rows = vec![0.0; games * d];
    let (mut first, mut second) = (vec![0.0; d], vec![0.0; d]);
    players.iter_mut().for_each(|player| player.reset());
    for (player, draw) in players.iter_mut().zip(draws.iter().flatten()) {
        player.tell(&draw.possible);
    }
    let turn =
        |game: usize, step: usize| draws.as_ref().is_none_or(|draws| draws[game].turns.contains(&step));
    for step in 0..mechanism.steps() {
        for (game, row) in rows.chunks_exact_mut(d).enumerate() {
            first.fill(0.0);
            second.fill(0.0);
            players[game].choose(step, &mut first, &mut second);
            watches[game].accept(neighbours, step, &first, &second)?;
            row.copy_from_slice(if bits[game] && turn(game, step) { &second } else { &first });
        }
        session.answer(&mut rows)?;
        for (player, row) in players.iter_mut().zip(rows.chunks_exact(d)) {
            player.observe(step, row);
        }
    }
    let outcome =
        |(second, player): (bool, &mut Box<dyn Player + '_>)| Outcome { second, score: player.score() };
    Ok(bits.into_iter().zip(&mut players).map(outcome).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers with its input: no privacy at all.
    struct Open {
        steps: usize,
    }

    struct Echo;

    impl StreamMechanism for Open {
        fn steps(&self) -> usize {
            self.steps
        }
        fn dimension(&self) -> usize {
            2
        }
        fn start(&self, _: usize, _: &mut AuditRng) -> Result<Box<dyn Session + '_>> {
            Ok(Box::new(Echo))
        }
    }

    impl Session for Echo {
        fn answer(&mut self, _: &mut [f64]) -> Result<()> {
            Ok(())
        }
    }

    /// Sends a fixed difference at each of some steps and remembers what came back.
    struct Script {
        differences: Vec<(usize, f64)>,
        shared: f64,
    }

    struct Reader<'a>(&'a Script, f64);

    impl Adversary for Script {
        fn name(&self) -> &'static str {
            "script"
        }
        fn player(&self) -> Box<dyn Player + '_> {
            Box::new(Reader(self, 0.0))
        }
    }

    impl Player for Reader<'_> {
        fn reset(&mut self) {
            self.1 = 0.0;
        }
        fn choose(&mut self, step: usize, first: &mut [f64], second: &mut [f64]) {
            first.fill(self.0.shared);
            second.fill(self.0.shared);
            if let Some((_, by)) = self.0.differences.iter().find(|(at, _)| *at == step) {
                second[0] += by;
            }
        }
        fn observe(&mut self, _: usize, answer: &[f64]) {
            self.1 += answer[0] - self.0.shared;
        }
        fn score(&mut self) -> f64 {
            self.1
        }
    }

    fn result(neighbours: &Neighbours, differences: &[(usize, f64)], shared: f64) -> Result<Vec<Outcome>> {
        let script = Script { differences: differences.to_vec(), shared };
        play(&Open { steps: 8 }, &script, neighbours, None, 200, &mut rng(1, 0))
    }

    #[test]
    fn without_noise_the_bit_is_plain() {
        let neighbours = Neighbours::single(Adjacency::ReplaceWithZero, 0.5).unwrap();
        // What both streams share may be as large as it likes.
        let outcomes = result(&neighbours, &[(3, 0.5)], 128.0).unwrap();
        assert!(outcomes.iter().all(|o| o.score == if o.second { 0.5 } else { 0.0 }));
        let ones = outcomes.iter().filter(|o| o.second).count();
        assert!((70..130).contains(&ones), "{ones} of 200 bits are set");
    }

    /// A unit that takes part at steps 2 and 5 in every game.
    struct Fixed;

    impl Lottery for Fixed {
        fn draw(&self, _: &mut AuditRng) -> Result<Draw> {
            Ok(Draw { possible: vec![0, 2, 4, 5, 6], turns: vec![2, 5] })
        }
    }

    #[test]
    fn a_lottery_decides_when_the_streams_differ() {
        let neighbours = Neighbours::drawn(8, Adjacency::ReplaceWithZero, 0.5).unwrap();
        let script = Script { differences: (0..8).map(|step| (step, 0.5)).collect(), shared: 1.0 };
        let outcomes =
            play(&Open { steps: 8 }, &script, &neighbours, Some(&Fixed), 100, &mut rng(1, 0)).unwrap();
        assert!(outcomes.iter().all(|o| o.score == if o.second { 1.0 } else { 0.0 }));
        let message = Neighbours::drawn(8, Adjacency::ReplaceOne, 0.5).unwrap_err().to_string();
        assert!(message.contains("replace-with-zero"), "{message}");
        assert!(Neighbours::drawn(8, Adjacency::AddOrRemove, f64::NAN).is_err());
    }

    #[test]
    fn the_referee_refuses_streams_that_are_no_neighbours() {
        let single = Neighbours::single(Adjacency::ReplaceWithZero, 0.5).unwrap();
        let message = |result: Result<Vec<Outcome>>| result.unwrap_err().to_string();
        assert!(message(result(&single, &[(3, 0.51)], 0.0)).contains("difference of norm 0.51 at step 3"));
        assert!(
            message(result(&single, &[(1, 0.1), (4, 0.1)], 0.0)).contains("difference number 2 at step 4")
        );
        assert!(message(result(&single, &[(2, f64::NAN)], 0.0)).contains("step 2"));
        assert!(message(result(&single, &[], f64::INFINITY)).contains("not finite at step 0"));

        let replace = Neighbours { adjacency: Adjacency::ReplaceOne, ..single };
        assert!(result(&replace, &[(3, 1.0)], 0.0).is_ok());
        assert!(result(&replace, &[(3, 1.01)], 0.0).is_err());

        let twice = Neighbours { participations: 2, separation: 3, ..single };
        assert!(result(&twice, &[(1, 0.5), (4, -0.5)], 0.0).is_ok());
        assert!(message(result(&twice, &[(1, 0.5), (3, 0.5)], 0.0)).contains("2 steps after the last"));
        assert!(message(result(&twice, &[(0, 0.1), (3, 0.1), (6, 0.1)], 0.0)).contains("number 3 at step 6"));
        assert!(result(&twice, &[(1, 0.5), (5, -0.5)], 0.0).is_ok());
        let epochs = Neighbours { aligned: true, ..twice };
        assert!(message(result(&epochs, &[(1, 0.5), (5, -0.5)], 0.0)).contains("whole epochs apart"));

        assert!(
            Neighbours::single(Adjacency::ReplaceOne, 0.0).unwrap_err().to_string().starts_with("clip is 0")
        );
    }

    #[test]
    fn batches_differ_and_repeat() {
        let bits = |seed, batch| rng(seed, batch).next_u64();
        assert_eq!(bits(7, 3), bits(7, 3));
        assert_ne!(bits(7, 3), bits(7, 4));
        assert_ne!(bits(7, 3), bits(8, 3));
    }
}
