//! What a command may take of the machine's memory.
//!
//! Commands say beforehand what their flags will cost ([`check`]), and the refusal names the flag. Whatever nobody foresaw
//! ends in the allocator of the program, which refuses in words where the usual one aborts or, on a machine that promises more
//! memory than it has, lets the system kill.

use crate::failure::Failure;
use crate::report;
use std::alloc::{GlobalAlloc, Layout, System};
use std::fmt::Display;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Taken for the machine's memory where it cannot be asked.
const UNKNOWN: usize = 64 << 30;

/// From here on allocations are counted; smaller ones add up to little.
const LARGE: usize = 1 << 20;

/// Bytes that this process may take: nine tenths of what was available when it was first asked.
fn limit() -> usize {
    static LIMIT: OnceLock<usize> = OnceLock::new();
    *LIMIT.get_or_init(|| {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let group = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"];
        let group = group.iter().filter_map(|path| read(path).trim().parse().ok()).min();
        let available = available(&read("/proc/meminfo")).unwrap_or(UNKNOWN);
        available.min(group.unwrap_or(usize::MAX)) / 10 * 9
    })
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn available(meminfo: &str) -> Option<usize> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Refuses a value of a flag that would need more memory than the machine has.
pub fn check(flag: &str, value: impl Display, bytes: f64) -> Result<(), Failure> {
    within(limit(), flag, value, bytes)
}

fn within(limit: usize, flag: &str, value: impl Display, bytes: f64) -> Result<(), Failure> {
    if bytes <= limit as f64 {
        return Ok(());
    }
    let (needed, left) = (size(bytes), size(limit as f64));
    Err(Failure::memory(format!(
        "{flag} is {value}, which needs {needed} of memory, but only {left} is available"
    )))
}

/// Bytes for people.
pub fn size(bytes: f64) -> String {
    let units = ["bytes", "kB", "MB", "GB", "TB", "PB"];
    let (mut value, mut unit) = (bytes, 0);
    while value >= 999.5 && unit + 1 < units.len() {
        (value, unit) = (value / 1e3, unit + 1);
    }
    let digits = if value < 10.0 && unit > 0 { 1 } else { 0 };
    if value < 1e6 {
        format!("{value:.digits$} {}", units[unit])
    } else {
        format!("{value:.0e} {}", units[unit])
    }
}

/// The system's allocator, within [`limit`].
pub struct Bounded;

/// Large allocations that live, in bytes.
static LIVE: AtomicUsize = AtomicUsize::new(0);

fn grant(bytes: usize) {
    if bytes >= LARGE {
        let live = LIVE.fetch_add(bytes, Ordering::Relaxed);
        if live.saturating_add(bytes) > limit() {
            refuse(bytes);
        }
    }
}

fn give_back(bytes: usize) {
    if bytes >= LARGE {
        LIVE.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Ends the program: an allocator may neither fail with words nor panic.
#[cold]
fn refuse(bytes: usize) -> ! {
    if bytes >= LARGE {
        let (more, left) = (size(bytes as f64), size(limit() as f64));
        let sizes = "use smaller sizes (steps, dimension, widths, counts)";
        report::fail(
            "memory",
            &format!("out of memory: {more} more is needed, but this process may use {left} in all; {sizes}"),
        );
    } else {
        report::fail("memory", "out of memory");
    }
    std::process::exit(1)
}

// SAFETY: every call is passed on to the system's allocator as it came, or ends the program.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        grant(layout.size());
        // SAFETY: as promised by the caller.
        let place = unsafe { System.alloc(layout) };
        if place.is_null() { refuse(layout.size()) } else { place }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        grant(layout.size());
        // SAFETY: as promised by the caller.
        let place = unsafe { System.alloc_zeroed(layout) };
        if place.is_null() { refuse(layout.size()) } else { place }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        grant(size);
        // SAFETY: as promised by the caller.
        let place = unsafe { System.realloc(old, layout, size) };
        give_back(layout.size());
        if place.is_null() { refuse(size) } else { place }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        give_back(layout.size());
        // SAFETY: as promised by the caller.
        unsafe { System.dealloc(place, layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_the_flag_and_the_memory() {
        assert!(within(4_000_000_000, "--dimension", 10, 4e9).is_ok());
        let refused = within(4_000_000_000, "--dimension", "1e14", 4e14).unwrap_err().to_string();
        assert_eq!(
            refused,
            "--dimension is 1e14, which needs 400 TB of memory, but only 4.0 GB is available"
        );
    }

    #[test]
    fn sizes_have_units() {
        let sizes: Vec<String> = [0.0, 999.0, 1e3, 12_345.0, 2.5e9, 1e15, 1e30].map(size).into();
        assert_eq!(sizes, ["0 bytes", "999 bytes", "1.0 kB", "12 kB", "2.5 GB", "1.0 PB", "1e15 PB"]);
    }

    #[test]
    fn what_is_available_is_read_from_the_system() {
        assert_eq!(
            available("MemTotal:  24684100 kB\nMemAvailable:   23611824 kB\n"),
            Some(23_611_824 << 10)
        );
        assert_eq!(available("nothing"), None);
        assert!(limit() > 1 << 20 && limit() < 1 << 50);
    }
}
