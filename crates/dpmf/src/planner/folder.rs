//! The folder that keeps the fits of plans.

use std::ffi::OsString;
use std::path::PathBuf;

/// The user's folder for the fits of plans: `dpmf/plans` in `$XDG_CACHE_HOME`, or in `~/.cache`. Nothing where neither is known.
pub fn cache_folder() -> Option<PathBuf> {
    folder_in(|name| std::env::var_os(name))
}

fn folder_in(variable: impl Fn(&str) -> Option<OsString>) -> Option<PathBuf> {
    let absolute = |name: &str| variable(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")))?;
    Some(cache.join("dpmf").join("plans"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cache_of_the_user_comes_before_the_home_and_relative_paths_count_for_nothing() {
        let of = |cache: Option<&str>, home: Option<&str>| {
            folder_in(|name| if name == "HOME" { home } else { cache }.map(OsString::from))
        };
        assert_eq!(of(Some("/c"), Some("/h")), Some("/c/dpmf/plans".into()));
        assert_eq!(of(Some("c"), Some("/h")), Some("/h/.cache/dpmf/plans".into()));
        assert_eq!(of(None, Some("/h")), Some("/h/.cache/dpmf/plans".into()));
        assert_eq!(of(Some(""), Some("h")), None);
        assert_eq!(of(None, None), None);
    }
}
