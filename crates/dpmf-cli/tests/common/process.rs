//! What a process has done so far, whatever else the machine does meanwhile.

use std::fs;
use std::time::Duration;

/// A process that takes longer does not move. No test takes a tenth of it.
pub const HANGS: Duration = Duration::from_secs(900);

/// Whether a process has had a third of a second of the processor, so that it is past its start.
pub fn works(process: u32) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{process}/stat")) else { return false };
    // Behind the name, which may have spaces: user and system time are the twelfth and thirteenth, in hundredths.
    let fields = stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace();
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<u64>().ok()).sum::<u64>() >= 33
}
