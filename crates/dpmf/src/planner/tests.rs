use super::*;

fn request(epsilon: f64) -> Request {
    Request::new(Workload::prefix_sum(40).unwrap(), 4000, 400, 4, epsilon, 1e-5).unwrap()
}

#[test]
fn the_choice_is_the_least_error_of_all_that_may_be_chosen() {
    let mut planner = Planner::default();
    for epsilon in [0.5, 4.0, 64.0] {
        let plan = planner.plan(&request(epsilon), &mut silent).unwrap();
        let open = plan.candidates().iter().filter(|c| c.excluded().is_none());
        let least = open.map(Candidate::rmse).fold(f64::INFINITY, f64::min);
        assert_eq!(plan.chosen().rmse(), least);
        assert!(plan.chosen().is_proved() && plan.chosen().rmse() < plan.dp_sgd().rmse());
        assert!(plan.candidates().is_sorted_by(|a, b| a.rmse() <= b.rmse()));
        let statement = plan.chosen().mechanism().privacy().unwrap();
        assert!((statement.calibration().epsilon(), statement.calibration().delta()) == (epsilon, 1e-5));
        let bytes = crate::format::to_bytes(plan.chosen().mechanism()).unwrap();
        let read = crate::format::unpack(&bytes).unwrap().mechanism.unwrap();
        assert_eq!(read.identity(), plan.chosen().mechanism().identity());
    }
}

#[test]
fn memory_and_trust_are_kept_to() {
    let mut planner = Planner::default();
    let plan = planner.plan(&Request { buffers: 0, ..request(4.0) }, &mut silent).unwrap();
    assert_eq!(plan.chosen().row().buffers, Some(0));
    assert!(plan.candidates().iter().any(|c| c.excluded().is_some_and(|why| why.contains("0 are allowed"))));
    let plan = planner.plan(&Request { trusted: false, ..request(4.0) }, &mut silent).unwrap();
    assert_eq!(plan.chosen().row().sampling, "none");
    assert!(plan.chosen().row().ratio_to_bound.unwrap() < 1.1);
    assert!(plan.chosen().rmse() > plan.lower_bound_rmse().unwrap());
}

#[test]
fn what_was_fitted_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let made = |folder: &std::path::Path| {
        let mut planner = Planner::new(FitCache::in_folder(folder.join("plans")));
        let plan = planner.plan(&request(2.0), &mut silent).unwrap();
        (plan.candidates().iter().map(Candidate::row).collect::<Vec<_>>(), planner.fits())
    };
    let (first, fits) = made(folder.path());
    assert!(fits > 5);
    assert!(std::fs::read_dir(folder.path().join("plans")).unwrap().count() > 5);
    assert_eq!(made(folder.path()), (first.clone(), 0));
    // A damaged file is made anew.
    for file in std::fs::read_dir(folder.path().join("plans")).unwrap() {
        std::fs::write(file.unwrap().path(), b"no mechanism").unwrap();
    }
    assert_eq!(made(folder.path()), (first, fits));
}

/// Whoever moves a slider waits for the fit in bins, and for numbers of bands that were not tried yet: more would be felt.
#[test]
fn another_budget_costs_few_fits() {
    let mut planner = Planner::default().quick();
    planner.plan(&request(2.0), &mut silent).unwrap();
    let first = planner.fits();
    for epsilon in [1.9, 2.1, 2.2, 2.3, 2.1, 4.0] {
        let before = planner.fits();
        planner.plan(&request(epsilon), &mut silent).unwrap();
        assert!(
            planner.fits() - before <= 4 && 4 <= first,
            "ε = {epsilon}: {first}, {}",
            planner.fits() - before
        );
    }
    let known = planner.fits();
    planner.plan(&request(2.2), &mut silent).unwrap();
    assert_eq!(planner.fits(), known);
}

#[test]
fn bad_requests_are_named() {
    let refused = |examples: u64, batch: u64, epochs: usize| {
        Request::steps(examples, batch, epochs).unwrap_err().to_string()
    };
    assert!(refused(0, 1, 1).starts_with("examples is 0"));
    assert!(refused(10, 0, 1).starts_with("batch is 0"));
    assert!(refused(10, 11, 1).starts_with("batch is 11"));
    assert!(refused(10, 1, 0).starts_with("epochs is 0"));
    assert!(refused(u64::MAX, 1, usize::MAX).contains("2147483647 steps"));
    assert_eq!(Request::steps(60_000, 1000, 10).unwrap(), 600);
    assert_eq!(Request::steps_per_epoch(15, 10).unwrap(), 2);
    assert_eq!(Request::steps_per_epoch(14, 10).unwrap(), 1);
    assert_eq!(Request::steps_per_epoch(u64::MAX, u64::MAX).unwrap(), 1);
    let other = Workload::prefix_sum(79).unwrap();
    assert!(Request::new(other, 8000, 400, 4, 1.0, 1e-5).unwrap_err().to_string().contains("workload"));
    assert!(Request::new(Workload::prefix_sum(80).unwrap(), 8000, 400, 4, -1.0, 1e-5).is_err());
}

#[test]
fn planning_ends_when_nobody_listens() {
    let stopped = Planner::default().plan(&request(1.0), &mut |_: &str| ControlFlow::Break(()));
    assert!(matches!(stopped, Err(Error::Interrupted { .. })));
}

#[test]
fn a_pull_asks_for_noise_that_fades_and_leaves_the_guarantee_and_the_optimizer() {
    let mut planner = Planner::default();
    let plain = planner.plan(&request(1.0), &mut silent).unwrap();
    let pulled = planner.plan(&Request { pull: 0.1, ..request(1.0) }, &mut silent).unwrap();
    for plan in [&plain, &pulled] {
        let mechanism = plan.chosen().mechanism();
        assert!(mechanism.workload().is_prefix_sum());
        assert_eq!(mechanism.privacy().unwrap().calibration().epsilon(), 1.0);
    }
    // What fades is no worse than what stays, and noise made for it is worse for iterates that are not pulled back.
    assert!(pulled.chosen().rmse() < plain.chosen().rmse());
    let unpulled =
        pulled.chosen().noise_multiplier() * pulled.chosen().mechanism().loss().sqrt_total() / 40_f64.sqrt();
    assert!(unpulled > 1.01 * plain.chosen().rmse(), "{unpulled}");
    for pull in [-0.1, 1.0, f64::NAN] {
        assert!(
            planner
                .plan(&Request { pull, ..request(1.0) }, &mut silent)
                .unwrap_err()
                .to_string()
                .contains("pull")
        );
    }
}

#[test]
fn a_proof_is_believed_with_its_seal_alone() {
    let folder = tempfile::tempdir().unwrap();
    let plans = folder.path().join("plans");
    let made = || {
        let mut proved = 0;
        let mut listen = |line: &str| {
            proved += usize::from(line.starts_with("proving"));
            ControlFlow::Continue(())
        };
        let mut planner = Planner::new(FitCache::in_folder(plans.clone())).quick();
        let plan = planner.plan(&request(2.0), &mut listen).unwrap();
        let rows: Vec<Row> = plan.candidates().iter().map(Candidate::row).collect();
        (rows, plan.chosen().mechanism().identity(), planner.fits(), proved > 0)
    };
    let (rows, identity, fits, proved) = made();
    assert!(proved && fits > 0);
    // The same question again, in what might be another process: nothing is fitted or proved.
    assert_eq!(made(), (rows.clone(), identity, 0, false));
    // Without the key nothing is believed; forms are still there.
    std::fs::remove_file(plans.join("seal.key")).unwrap();
    let (again, _, fits, proved) = made();
    assert!(proved && fits == 0 && again == rows);
    // A smaller number of somebody else is no proof.
    for file in std::fs::read_dir(&plans).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_some_and(|ending| ending == "sealed") {
            let mut bytes = std::fs::read(&file).unwrap();
            bytes[..8].copy_from_slice(&0.01_f64.to_le_bytes());
            std::fs::write(&file, bytes).unwrap();
        }
    }
    assert_eq!(made(), (rows, identity, 0, true));
}

#[test]
#[ignore = "a minute: thirty thousand steps"]
fn long_runs_are_planned_in_bins() {
    let workload = Workload::prefix_sum(30_000).unwrap();
    let request = Request::new(workload, 30_000_000, 1000, 1, 3.0, 1e-6).unwrap();
    let plan = Planner::default().plan(&request, &mut silent).unwrap();
    assert!(plan.chosen().row().sampling.contains("bins") && plan.chosen().is_proved());
    assert!(plan.chosen().rmse() < 0.7 * plan.dp_sgd().rmse());
    assert!(plan.unfitted().iter().all(|row| row.reason().contains("left out")));
    let untrusted = Planner::default().plan(&Request { trusted: false, ..request }, &mut silent).unwrap();
    assert_eq!(untrusted.chosen().row().sampling, "none");
}
