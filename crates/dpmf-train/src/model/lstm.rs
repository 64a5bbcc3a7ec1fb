//! Next-token language model: embedding, LSTM, projection, softmax.

use std::cmp::Reverse;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::activation::{cross_entropy, sigmoid, tanh};
use super::initial::Uniform;
use super::packet::{self, Packet};
use super::product::{Interleaved, Matrix, Panels, accumulate, accumulate_inner, accumulate_rows};
use super::{Block, Model, Score, checked_size};
use crate::{Result, Text};
use dpmf::simd::dispatch;

/// Sequences worked on together: bounds the memory and is wide enough for full tiles.
const TOGETHER: usize = 64;

/// A language model that predicts each token from those before it.
///
/// With `xₜ` the embedding of token `t`, gates `i f g o = xₜ·W + hₜ₋₁·U + b`, cell
/// `cₜ = σ(f)⊙cₜ₋₁ + σ(i)⊙tanh g`, hidden `hₜ = σ(o)⊙tanh cₜ`, it predicts token `t + 1` by
/// `softmax((hₜ·P + p)·V + v)`; without a projection by `softmax(hₜ·V + v)`. A sequence of `L` tokens yields
/// `L − 1` predictions; the state starts at zero with each sequence.
///
/// Cost: about six operations per parameter outside the embedding and prediction. Sequences of a batch are
/// sorted by length and run side by side, up to 64 at a time, so that memory does not grow with the batch. A
/// call allocates nothing once the workspace has seen a batch of that size.
///
/// # Examples
///
/// The word model of *Denisov et al. 2022* (and of the StackOverflow benchmark before it) has 4 050 748 parameters:
///
/// ```
/// use dpmf_train::model::{Lstm, Model};
///
/// let words = Lstm { vocabulary: 10_004, embedding: 96, hidden: 670, projection: Some(96) }.checked()?;
/// assert_eq!(words.parameters(), 4_050_748);
/// # Ok::<(), dpmf_train::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Lstm {
    /// Number of tokens; a token is below it.
    pub vocabulary: usize,
    /// Width of an embedding.
    pub embedding: usize,
    /// Width of the recurrent state.
    pub hidden: usize,
    /// Width of the linear layer between the state and the output, if there is one.
    pub projection: Option<usize>,
}

/// What an [`Lstm`] remembers of the tokens it has read.
#[derive(Debug, Clone, PartialEq)]
pub struct LstmState {
    hidden: Vec<f32>,
    cell: Vec<f32>,
}

/// Adds `input · weights`, row-major with one row an input.
fn add_product(out: &mut [f32], input: &[f32], weights: &[f32]) {
    for (x, row) in input.iter().zip(weights.chunks_exact(out.len())) {
        out.iter_mut().zip(row).for_each(|(out, weight)| *out += x * weight);
    }
}

/// Where each block lies in the flat slice.
struct Layout {
    embedding: Range<usize>,
    input: Range<usize>,
    recurrent: Range<usize>,
    bias: Range<usize>,
    projection: Range<usize>,
    projection_bias: Range<usize>,
    output: Range<usize>,
    output_bias: Range<usize>,
}

impl Lstm {
    /// The model itself if its sizes make sense.
    ///
    /// Errors: a size of zero; a vocabulary above 65536, the number of `u16` tokens; more than 2³¹ parameters.
    pub fn checked(self) -> Result<Self> {
        checked_size("vocabulary", self.vocabulary, 1 << 16)?;
        checked_size("embedding", self.embedding, 1 << 14)?;
        checked_size("hidden", self.hidden, 1 << 14)?;
        checked_size("projection", self.projection.unwrap_or(1), 1 << 14)?;
        checked_size("parameters", self.parameters(), 1 << 31)?;
        Ok(self)
    }

    /// Names and places of the blocks, in order; they cover the parameters.
    ///
    /// Matrices are row-major with one row an input; the four gates `i f g o` lie side by side.
    pub fn layout(&self) -> Vec<Block> {
        let at = self.places();
        let (tokens, width) = (self.vocabulary, 4 * self.hidden);
        let mut blocks = vec![
            Block::new("embedding", at.embedding, &[tokens, self.embedding]),
            Block::new("lstm.input", at.input, &[self.embedding, width]),
            Block::new("lstm.recurrent", at.recurrent, &[self.hidden, width]),
            Block::new("lstm.bias", at.bias, &[width]),
        ];
        if let Some(projected) = self.projection {
            blocks.push(Block::new("projection.weight", at.projection, &[self.hidden, projected]));
            blocks.push(Block::new("projection.bias", at.projection_bias, &[projected]));
        }
        blocks.push(Block::new("output.weight", at.output, &[self.features(), tokens]));
        blocks.push(Block::new("output.bias", at.output_bias, &[tokens]));
        blocks
    }

    /// Width of what the output layer reads.
    fn features(&self) -> usize {
        self.projection.unwrap_or(self.hidden)
    }

    fn places(&self) -> Layout {
        let mut end = 0;
        let mut next = |length: usize| {
            end += length;
            end - length..end
        };
        let (width, projected) = (4 * self.hidden, self.projection.unwrap_or(0));
        Layout {
            embedding: next(self.vocabulary * self.embedding),
            input: next(self.embedding * width),
            recurrent: next(self.hidden * width),
            bias: next(width),
            projection: next(self.hidden * projected),
            projection_bias: next(projected),
            output: next(self.features() * self.vocabulary),
            output_bias: next(self.vocabulary),
        }
    }

    /// Predictions the batch yields.
    fn predictions(&self, batch: &[&[u16]]) -> usize {
        batch.iter().map(|sequence| self.predictions_of(sequence)).sum()
    }

    fn predictions_of(&self, sequence: &[u16]) -> usize {
        if self.admits(sequence) { sequence.len().saturating_sub(1) } else { 0 }
    }

    /// What it remembers before the first token.
    pub fn state(&self) -> LstmState {
        LstmState { hidden: vec![0.0; self.hidden], cell: vec![0.0; self.hidden] }
    }

    /// Reads one token, and gives the probabilities of the next for every token of the vocabulary.
    ///
    /// Cost: two operations per parameter outside the embedding.
    ///
    /// # Panics
    /// For parameters of another length than the model's, a token that it does not know, and a state of another model.
    pub fn read(&self, parameters: &[f32], token: u16, state: &mut LstmState) -> Vec<f32> {
        super::check_lengths(self.parameters(), parameters, parameters);
        let at = self.places();
        let embedded = &parameters[at.embedding][usize::from(token) * self.embedding..][..self.embedding];
        let mut gates = parameters[at.bias].to_vec();
        add_product(&mut gates, embedded, &parameters[at.input]);
        add_product(&mut gates, &state.hidden, &parameters[at.recurrent]);
        for unit in 0..self.hidden {
            let gate = |which: usize| gates[which * self.hidden + unit];
            let cell = sigmoid(gate(1)) * state.cell[unit] + sigmoid(gate(0)) * tanh(gate(2));
            state.cell[unit] = cell;
            state.hidden[unit] = sigmoid(gate(3)) * tanh(cell);
        }
        let mut logits = parameters[at.output_bias].to_vec();
        if self.projection.is_some() {
            let mut projected = parameters[at.projection_bias].to_vec();
            add_product(&mut projected, &state.hidden, &parameters[at.projection]);
            add_product(&mut logits, &projected, &parameters[at.output]);
        } else {
            add_product(&mut logits, &state.hidden, &parameters[at.output]);
        }
        // The gradient of the loss of any token is the probabilities but for a 1.
        cross_entropy(&mut logits, 0, 1.0);
        logits[0] += 1.0;
        logits
    }

    /// Packs the weights that the forward pass multiplies by.
    fn pack(&self, parameters: &[f32], at: &Layout, space: &mut LstmWorkspace) {
        let width = 4 * self.hidden;
        space.input.pack(&parameters[at.input.clone()], self.embedding, width);
        space.recurrent.pack(&parameters[at.recurrent.clone()], self.hidden, width);
        if let Some(projection) = self.projection {
            space.projection.pack(&parameters[at.projection.clone()], self.hidden, projection);
        }
        space.output.pack(&parameters[at.output.clone()], self.features(), self.vocabulary);
    }

    /// Sorts the sequences by length and lays their predictions out step by step.
    fn arrange(&self, batch: &[&[u16]], space: &mut LstmWorkspace) {
        space.order.clear();
        space.order.extend((0..batch.len()).filter(|&index| self.predictions_of(batch[index]) > 0));
        space.order.sort_unstable_by_key(|&index| (Reverse(batch[index].len()), index));
        space.steps.clear();
        space.tokens.clear();
        let mut active = space.order.len();
        for step in 0.. {
            while active > 0 && batch[space.order[active - 1]].len() < step + 2 {
                active -= 1;
            }
            if active == 0 {
                break;
            }
            let first = space.tokens.len();
            space.steps.push(first..first + active);
            space.tokens.extend(space.order[..active].iter().map(|&index| {
                let sequence = batch[index];
                (usize::from(sequence[step]), usize::from(sequence[step + 1]))
            }));
        }
    }

    /// Runs the arranged sequences forward and leaves the gradient of `scale` times the loss in the logits.
    fn forward(&self, parameters: &[f32], at: &Layout, scale: f32, space: &mut LstmWorkspace) -> Score {
        let (embedding, hidden, width) = (self.embedding, self.hidden, 4 * self.hidden);
        let (rows, joint) = (space.tokens.len(), embedding + hidden);
        space.inputs.resize(rows * joint, 0.0);
        fill_rows(&mut space.gates, rows, &parameters[at.bias.clone()]);
        for buffer in [&mut space.cells, &mut space.squashed, &mut space.states] {
            buffer.resize(rows * hidden, 0.0);
        }

        let table = &parameters[at.embedding.clone()];
        for (row, &(token, _)) in space.inputs.chunks_exact_mut(joint.max(1)).zip(&space.tokens) {
            row[..embedding].copy_from_slice(&table[token * embedding..][..embedding]);
        }
        let inputs = Matrix::new(&space.inputs, rows, embedding, joint);
        accumulate(&mut space.gates, width, inputs, &space.input, &mut space.interleaved);

        for (step, range) in space.steps.iter().enumerate() {
            let active = range.len();
            let gates = &mut space.gates[range.start * width..range.end * width];
            let (past, present) = space.cells.split_at_mut(range.start * hidden);
            if step == 0 {
                for row in space.inputs.chunks_exact_mut(joint.max(1)).take(active) {
                    row[embedding..].fill(0.0);
                }
            } else {
                let before = &space.steps[step - 1];
                for row in 0..active {
                    let state = &space.states[(before.start + row) * hidden..][..hidden];
                    space.inputs[(range.start + row) * joint + embedding..][..hidden].copy_from_slice(state);
                }
                let states = Matrix::new(&space.states[before.start * hidden..], active, hidden, hidden);
                accumulate(gates, width, states, &space.recurrent, &mut space.interleaved);
            }
            for row in 0..active {
                let previous = match step {
                    0 => &space.zeros[..hidden],
                    _ => &past[(space.steps[step - 1].start + row) * hidden..][..hidden],
                };
                let place = (range.start + row) * hidden..(range.start + row + 1) * hidden;
                cell_forward(
                    &mut gates[row * width..][..width],
                    previous,
                    &mut present[row * hidden..][..hidden],
                    &mut space.squashed[place.clone()],
                    &mut space.states[place],
                );
            }
        }

        if let Some(projection) = self.projection {
            fill_rows(&mut space.projected, rows, &parameters[at.projection_bias.clone()]);
            let states = Matrix::new(&space.states, rows, hidden, hidden);
            accumulate(&mut space.projected, projection, states, &space.projection, &mut space.interleaved);
        }
        let features = if self.projection.is_some() { &space.projected } else { &space.states };
        fill_rows(&mut space.logits, rows, &parameters[at.output_bias.clone()]);
        let features = Matrix::new(features, rows, self.features(), self.features());
        accumulate(&mut space.logits, self.vocabulary, features, &space.output, &mut space.interleaved);

        let mut score = Score { predictions: rows as u64, ..Score::default() };
        for (logits, &(_, target)) in space.logits.chunks_exact_mut(self.vocabulary.max(1)).zip(&space.tokens)
        {
            let (loss, correct) = cross_entropy(logits, target, scale);
            score.loss += loss;
            score.correct += u64::from(correct);
        }
        score
    }

    /// Adds the gradient of what `forward` left in the logits.
    fn backward(&self, parameters: &[f32], at: &Layout, space: &mut LstmWorkspace, gradient: &mut [f32]) {
        let (embedding, hidden, width) = (self.embedding, self.hidden, 4 * self.hidden);
        let (rows, joint) = (space.tokens.len(), embedding + hidden);

        let (features, read) =
            (self.features(), if self.projection.is_some() { &space.projected } else { &space.states });
        let above =
            if self.projection.is_some() { &mut space.projected_gradient } else { &mut space.state_gradient };
        accumulate_rows(&mut gradient[at.output_bias.clone()], &space.logits);
        space.right.pack(&space.logits, rows, self.vocabulary);
        let read = Matrix::new(read, rows, features, features).transposed();
        accumulate(
            &mut gradient[at.output.clone()],
            self.vocabulary,
            read,
            &space.right,
            &mut space.interleaved,
        );
        zeros(above, rows * features);
        let weights = &parameters[at.output.clone()];
        accumulate_inner(above, &space.logits, weights, rows, features, self.vocabulary);

        if let Some(projection) = self.projection {
            accumulate_rows(&mut gradient[at.projection_bias.clone()], &space.projected_gradient);
            space.right.pack(&space.projected_gradient, rows, projection);
            let states = Matrix::new(&space.states, rows, hidden, hidden).transposed();
            let target = &mut gradient[at.projection.clone()];
            accumulate(target, projection, states, &space.right, &mut space.interleaved);
            zeros(&mut space.state_gradient, rows * hidden);
            let weights = &parameters[at.projection.clone()];
            let (target, source) = (&mut space.state_gradient, &space.projected_gradient);
            accumulate_inner(target, source, weights, rows, hidden, projection);
        }

        let weights = &parameters[at.recurrent.clone()];
        zeros(&mut space.cell_gradient, space.order.len() * hidden);
        for (step, range) in space.steps.iter().enumerate().rev() {
            for row in 0..range.len() {
                let place = (range.start + row) * hidden..(range.start + row + 1) * hidden;
                let previous = match step {
                    0 => &space.zeros[..hidden],
                    _ => &space.cells[(space.steps[step - 1].start + row) * hidden..][..hidden],
                };
                cell_backward(
                    &mut space.gates[(range.start + row) * width..][..width],
                    previous,
                    &space.squashed[place.clone()],
                    &space.state_gradient[place],
                    &mut space.cell_gradient[row * hidden..][..hidden],
                );
            }
            if step > 0 {
                let target = &mut space.state_gradient[space.steps[step - 1].start * hidden..];
                let gates = &space.gates[range.start * width..range.end * width];
                accumulate_inner(target, gates, weights, range.len(), hidden, width);
            }
        }

        accumulate_rows(&mut gradient[at.bias.clone()], &space.gates);
        space.right.pack(&space.gates, rows, width);
        let inputs = Matrix::new(&space.inputs, rows, joint, joint).transposed();
        // Input and recurrent weights lie one after the other, as the two parts of a row of `inputs` do.
        let target = &mut gradient[at.input.start..at.recurrent.end];
        accumulate(target, width, inputs, &space.right, &mut space.interleaved);

        zeros(&mut space.input_gradient, rows * embedding);
        let weights = &parameters[at.input.clone()];
        accumulate_inner(&mut space.input_gradient, &space.gates, weights, rows, embedding, width);
        let table = &mut gradient[at.embedding.clone()];
        for (row, &(token, _)) in space.input_gradient.chunks_exact(embedding.max(1)).zip(&space.tokens) {
            accumulate_rows(&mut table[token * embedding..][..embedding], row);
        }
    }
}

/// Memory of an [`Lstm`] for one thread.
#[derive(Debug, Clone, Default)]
pub struct LstmWorkspace {
    /// Sequences with predictions, longest first.
    order: Vec<usize>,
    /// Rows of each step; row `k` of a step belongs to the `k`-th sequence of the order.
    steps: Vec<Range<usize>>,
    /// Token read and token to predict, for each row.
    tokens: Vec<(usize, usize)>,
    zeros: Vec<f32>,
    /// Embedding and previous state side by side.
    inputs: Vec<f32>,
    /// Gates after their activation; their gradient before it once the backward pass went over them.
    gates: Vec<f32>,
    cells: Vec<f32>,
    /// tanh of the cells.
    squashed: Vec<f32>,
    states: Vec<f32>,
    projected: Vec<f32>,
    logits: Vec<f32>,
    projected_gradient: Vec<f32>,
    state_gradient: Vec<f32>,
    cell_gradient: Vec<f32>,
    input_gradient: Vec<f32>,
    input: Panels,
    recurrent: Panels,
    projection: Panels,
    output: Panels,
    right: Panels,
    interleaved: Interleaved,
}

impl Model for Lstm {
    type Domain = Text;
    type Workspace = LstmWorkspace;

    fn kind(&self) -> &'static str {
        "lstm"
    }

    fn parameters(&self) -> usize {
        self.places().output_bias.end
    }

    /// Parameters before training: a pure function of `seed`, which is public.
    ///
    /// Uniform numbers of mean zero: embeddings of variance 1, weights of variance one over the number of their
    /// inputs, output weights of a hundredth of that; biases zero but for the forget gate's, which are one, so
    /// that the cell remembers from the start. The untrained loss is within about 1 % of `ln vocabulary`.
    fn initial(&self, seed: u64) -> Vec<f32> {
        let at = self.places();
        let mut parameters = vec![0.0; self.parameters()];
        let mut uniform = Uniform::new(seed);
        uniform.fill(&mut parameters[at.embedding], 1.0);
        uniform.fill_layer(&mut parameters[at.input], self.embedding, 1.0);
        uniform.fill_layer(&mut parameters[at.recurrent], self.hidden, 1.0);
        parameters[at.bias][self.hidden..2 * self.hidden].fill(1.0);
        uniform.fill_layer(&mut parameters[at.projection], self.hidden, 1.0);
        uniform.fill_layer(&mut parameters[at.output], self.features(), 0.1);
        parameters
    }

    fn workspace(&self) -> LstmWorkspace {
        LstmWorkspace { zeros: vec![0.0; self.hidden], ..LstmWorkspace::default() }
    }

    /// Whether every token lies in the vocabulary; a sequence that is not admitted yields no prediction.
    fn admits(&self, sequence: &[u16]) -> bool {
        sequence.iter().all(|&token| usize::from(token) < self.vocabulary)
    }

    fn gradient(
        &self,
        parameters: &[f32],
        batch: &[&[u16]],
        workspace: &mut LstmWorkspace,
        gradient: &mut [f32],
    ) -> Score {
        super::check_lengths(self.parameters(), parameters, gradient);
        let (at, scale) = (self.places(), 1.0 / self.predictions(batch) as f32);
        self.pack(parameters, &at, workspace);
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            self.arrange(batch, workspace);
            if !workspace.tokens.is_empty() {
                score += self.forward(parameters, &at, scale, workspace);
                self.backward(parameters, &at, workspace, gradient);
            }
        }
        score
    }

    fn score(&self, parameters: &[f32], batch: &[&[u16]], workspace: &mut LstmWorkspace) -> Score {
        super::check_lengths(self.parameters(), parameters, parameters);
        let at = self.places();
        self.pack(parameters, &at, workspace);
        let mut score = Score::default();
        for batch in batch.chunks(TOGETHER) {
            self.arrange(batch, workspace);
            if !workspace.tokens.is_empty() {
                score += self.forward(parameters, &at, 0.0, workspace);
            }
        }
        score
    }
}

/// `count` copies of a row.
fn fill_rows(buffer: &mut Vec<f32>, count: usize, row: &[f32]) {
    buffer.clear();
    for _ in 0..count {
        buffer.extend_from_slice(row);
    }
}

fn zeros(buffer: &mut Vec<f32>, length: usize) {
    buffer.clear();
    buffer.resize(length, 0.0);
}

dispatch! {
    /// One step of one sequence: gates become their activations.
    fn cell_forward / cell_forward_portable / cell_forward_avx2 =
        cell_forward_any<packet::Baseline | packet::Avx2>(
            gates: &mut [f32], previous: &[f32], cells: &mut [f32], squashed: &mut [f32], states: &mut [f32]
        );
}

#[inline(always)]
fn cell_forward_any<P: Packet>(
    gates: &mut [f32],
    previous: &[f32],
    cells: &mut [f32],
    squashed: &mut [f32],
    states: &mut [f32],
) {
    let hidden = cells.len();
    let (input, rest) = gates.split_at_mut(hidden);
    let (forget, rest) = rest.split_at_mut(hidden);
    let (candidate, output) = rest.split_at_mut(hidden);
    let (output, previous) = (&mut output[..hidden], &previous[..hidden]);
    let (squashed, states) = (&mut squashed[..hidden], &mut states[..hidden]);
    for unit in 0..hidden {
        let (i, f) = (sigmoid(input[unit]), sigmoid(forget[unit]));
        let (g, o) = (tanh(candidate[unit]), sigmoid(output[unit]));
        let c = f * previous[unit] + i * g;
        let t = tanh(c);
        (input[unit], forget[unit], candidate[unit], output[unit]) = (i, f, g, o);
        (cells[unit], squashed[unit], states[unit]) = (c, t, o * t);
    }
}

dispatch! {
    /// One step of one sequence, backwards: activations become the gradients of the gates before them, and the
    /// gradient of the cell becomes that of the cell before.
    fn cell_backward / cell_backward_portable / cell_backward_avx2 =
        cell_backward_any<packet::Baseline | packet::Avx2>(
            gates: &mut [f32], previous: &[f32], squashed: &[f32], state_gradient: &[f32], cell_gradient: &mut [f32]
        );
}

#[inline(always)]
fn cell_backward_any<P: Packet>(
    gates: &mut [f32],
    previous: &[f32],
    squashed: &[f32],
    state_gradient: &[f32],
    cell_gradient: &mut [f32],
) {
    let hidden = cell_gradient.len();
    let (input, rest) = gates.split_at_mut(hidden);
    let (forget, rest) = rest.split_at_mut(hidden);
    let (candidate, output) = rest.split_at_mut(hidden);
    let (output, previous) = (&mut output[..hidden], &previous[..hidden]);
    let (squashed, state_gradient) = (&squashed[..hidden], &state_gradient[..hidden]);
    for unit in 0..hidden {
        let (i, f, g, o) = (input[unit], forget[unit], candidate[unit], output[unit]);
        let (t, dh) = (squashed[unit], state_gradient[unit]);
        let dc = cell_gradient[unit] + dh * o * (1.0 - t * t);
        input[unit] = dc * g * (i * (1.0 - i));
        forget[unit] = dc * previous[unit] * (f * (1.0 - f));
        candidate[unit] = dc * i * (1.0 - g * g);
        output[unit] = dh * t * (o * (1.0 - o));
        cell_gradient[unit] = dc * f;
    }
}
