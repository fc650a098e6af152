from tinsmith_cli import main

raise SystemExit(main())
